"""Evaluations side by side: those of one run that came after its training, and those of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.record.differences import Answers, answers_of, task_difference
from tunebook.record.page.evaluation import change_text, is_share_of_items, score_text
from tunebook.record.page.numbers import NO_VALUE, Unit
from tunebook.record.run_record import RunRecord

FINAL_MODEL = "model"  # how a record calls a run's own final model


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One score in a table of several."""

    text: str
    change: str = ""  # against the first column; empty in it, and where either has no score
    num_items: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """One task in a table of several evaluations."""

    task: str
    metric: str
    cells: list[Cell]

    @property
    def num_items(self) -> str:
        """How many items were answered, where all columns have as many; otherwise each column's number."""
        numbers = [cell.num_items for cell in self.cells if cell.num_items is not None]
        distinct = sorted(set(numbers))
        return " / ".join(f"{number:,}" for number in (distinct[:1] if len(distinct) == 1 else numbers))


@dataclass(frozen=True, kw_only=True)
class LaterEvaluation:
    """An evaluation of one of a run's models that was asked for afterwards."""

    name: str
    model: str
    limit: str  # empty for all items
    lines: list[tuple[str, str, str, str]]  # task, metric, score, items


def compare_scores(records: Sequence[RunRecord]) -> list[ScoreLine]:
    """Every task that any of the runs was evaluated on, a column per run; changes are against the first run."""
    found = [_scores_of(record) for record in records]
    names = list(dict.fromkeys(name for scores in found for name in scores))
    return [_line(name, [scores.get(name) for scores in found]) for name in names]


def later_evaluations(record: RunRecord) -> list[LaterEvaluation]:
    """The evaluations by `tunebook eval`, the newest first."""
    return [
        LaterEvaluation(
            name=evaluation["when"],
            model=evaluation["model"],
            limit=f"the first {evaluation['limit']} items" if evaluation.get("limit") else "",
            lines=[
                (name, _words(task["metric"]), score_text(task, _unit(task)), f"{task['num_items']:,}")
                for name, task in evaluation["tasks"].items()
            ],
        )
        for evaluation in reversed(record.evaluations)
    ]


def failed_tasks(record: RunRecord) -> list[str]:
    """Tasks of the evaluations before and after training that failed, with why."""
    return [
        f"{name}, {when} training: {why}"
        for when, evaluation in (("before", record.before), ("after", record.after))
        for name, why in ((evaluation or {}).get("failed") or {}).items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Found:
    score: Mapping[str, Any]
    tasks: Mapping[str, Mapping[str, Any]]  # all of the same evaluation
    answers: Answers


def _scores_of(record: RunRecord) -> dict[str, _Found]:
    """Each task's score of the run's final model: after its training, or else in the newest later evaluation."""
    found: dict[str, _Found] = {}
    later = [evaluation for evaluation in record.evaluations if evaluation["model"] == FINAL_MODEL]
    for evaluation in (record.after, *reversed(later)):
        tasks = {} if evaluation is None else evaluation["tasks"]
        if any(name not in found for name in tasks):
            answers = answers_of(record.folder, evaluation)
            for name, task in tasks.items():
                found.setdefault(name, _Found(score=task, tasks=tasks, answers=answers))
    return found


def _line(name: str, found: Sequence[_Found | None]) -> ScoreLine:
    scores = [one.score for one in found if one is not None]
    unit = _unit(*scores)
    first = found[0]
    cells = []
    for one in found:
        if one is None:
            cells.append(Cell(text=NO_VALUE))
            continue
        change = ""
        if first is not None and one is not first:
            difference = task_difference(name, first.tasks, one.tasks, first.answers, one.answers)
            change = change_text(difference, unit)
        cells.append(Cell(text=score_text(one.score, unit), change=change, num_items=one.score["num_items"]))
    return ScoreLine(task=name, metric=_words(scores[0]["metric"]), cells=cells)


def _unit(*scores: Mapping[str, Any]) -> Unit:
    return Unit.share if is_share_of_items(*scores) else Unit.plain


def _words(metric: str) -> str:
    return metric.replace("_", " ")
