"""The evaluations in a report: scores before and after training and of later evaluations, samples, programs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.record.differences import Answers, Difference, answers_of, standard_error, task_difference
from tunebook.record.page.numbers import MINUS, NO_VALUE, Unit, format_value
from tunebook.record.run_record import RunRecord

NUM_SAMPLES = 5
FINAL_MODEL = "model"  # how a record names a run's own final model
# How the chat templates of the recipes' models write a turn. Other prompts are shown unchanged.
_TURN_PATTERNS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)
_Scores = Mapping[str, Mapping[str, Any]]  # of one evaluation, by task


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score with its standard error."""

    value: float
    standard_error: float | None
    text: str


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One line of the table: a task, or one group of its items."""

    name: str
    is_group: bool
    metric: str
    before: Score | None
    after: Score | None
    change: str
    num_items: int
    baseline: float | None  # drawn as a tick on the bar
    has_bar: bool  # only if every score is a share


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's answer to a sample's prompt."""

    text: str
    is_right: bool | None  # None: the metric does not judge single answers


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt, the expected answer, and the answers before and after training."""

    task: str
    turns: list[tuple[str, str]]  # role and text; one turn without a role if the prompt follows no known template
    expected: str
    before: Answer | None
    after: Answer | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One score in a table of several runs."""

    text: str
    change: str = ""  # from the first column; empty in it, and if either has no score
    num_items: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """One task in a table of several runs."""

    task: str
    metric: str
    cells: list[Cell]

    @property
    def num_items(self) -> str:
        """The number of answered items if it is the same in all columns, else that of each column."""
        numbers = [cell.num_items for cell in self.cells if cell.num_items is not None]
        return " / ".join(f"{number:,}" for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))


@dataclass(frozen=True, kw_only=True)
class LaterEvaluation:
    """An evaluation of one of a run's models by `tunebook eval`."""

    name: str
    model: str
    limit: str  # empty for all items
    lines: list[tuple[str, str, str, str]]  # task, metric, score, items


def score_rows(
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    answers_before: Answers | None = None,
    answers_after: Answers | None = None,
) -> list[ScoreRow]:
    """Every task, each followed by its groups. The change is paired by item if both evaluations have answers."""
    old, new = (before or {}).get("tasks", {}), (after or {}).get("tasks", {})
    answers = (answers_before or {}, answers_after or {})
    names = list(dict.fromkeys([*new, *old]))
    # A baseline does not name its task, so it is drawn only if there is a single one.
    baseline = (_baseline(before, after) or {}) if len(names) == 1 else {}
    rows = []
    for name in names:
        rows.append(_score_row(name, None, old, new, answers, baseline.get("value")))
        for group in dict.fromkeys(group for tasks in (new, old) for group in tasks.get(name, {}).get("groups") or {}):
            level = baseline.get("groups", {}).get(group, {}).get("value")
            rows.append(_score_row(name, group, old, new, answers, level))
    return rows


def _score_row(
    name: str, group: str | None, old: _Scores, new: _Scores, answers: tuple[Answers, Answers], baseline: float | None
) -> ScoreRow:
    """The row of a task, or of a group of its items."""
    tasks = [scores.get(name) for scores in (old, new)]
    pair = tasks if group is None else [((task or {}).get("groups") or {}).get(group) for task in tasks]
    scores = [score for score in pair if score]
    unit = _unit(*scores)
    change = ""
    if len(scores) == 2:
        change = change_text(task_difference(name, old, new, *answers, group), unit)
    metric: str = (tasks[1] or tasks[0] or {})["metric"]
    return ScoreRow(
        name=name if group is None else group,
        is_group=group is not None,
        metric=metric.replace("_", " "),
        before=_score(pair[0], unit),
        after=_score(pair[1], unit),
        change=change,
        num_items=scores[-1]["num_items"],
        baseline=baseline if unit is Unit.share else None,
        has_bar=unit is Unit.share,
    )


def _score(found: Mapping[str, Any] | None, unit: Unit) -> Score | None:
    if found is None:
        return None
    return Score(value=found["value"], standard_error=standard_error(found), text=score_text(found, unit))


def _unit(*scores: Mapping[str, Any]) -> Unit:
    """Percent for shares of right answers; plain for other scores, such as a perplexity."""
    return Unit.share if all(0 <= score["value"] <= 1 for score in scores) else Unit.plain


def score_text(score: Mapping[str, Any], unit: Unit) -> str:
    """A score with its standard error."""
    error, text = standard_error(score), format_value(score["value"], unit)
    if error is None:
        return text
    return text + (f" ± {100 * error:.1f}" if unit is Unit.share else f" ± {format_value(error)}")


def change_text(difference: Difference, unit: Unit) -> str:
    """A difference with its sign and standard error; for shares in percentage points."""
    sign = "" if not difference.value else "+" if difference.value > 0 else MINUS
    value, error = abs(difference.value), difference.standard_error
    if unit is Unit.share:
        return f"{sign}{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}") + " points"
    return f"{sign}{format_value(value)}" + ("" if error is None else f" ± {format_value(error)}")


def _baseline(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    return (after or {}).get("baseline") or (before or {}).get("baseline")


def baseline_text(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str | None:
    """The name and score of the baseline; None without one."""
    baseline = _baseline(before, after)
    return None if baseline is None else f"{baseline['name']}: {format_value(baseline['value'], _unit(baseline))}"


def pair_samples(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[Sample]:
    """Five samples, in the order that the evaluation chose, with the answers to the same prompt before and after."""
    old, new = (
        {(sample["task"], sample["prompt"]): sample for sample in evaluation["samples"]} if evaluation else {}
        for evaluation in (before, after)
    )
    chosen = list((new or old).items())[:NUM_SAMPLES]
    return [_sample(sample, old.get(key), new.get(key)) for key, sample in chosen]


def _sample(shown: dict[str, Any], old: dict[str, Any] | None, new: dict[str, Any] | None) -> Sample:
    group = shown.get("group")
    before, after = (
        None if found is None else Answer(text=str(found["answer"]), is_right=found["correct"]) for found in (old, new)
    )
    return Sample(
        task=f"{shown['task']}: {group}" if group and group != shown["task"] else shown["task"],
        turns=split_turns(shown["prompt"]),
        expected=str(shown["expected"]),
        before=before,
        after=after,
    )


def split_turns(prompt: str) -> list[tuple[str, str]]:
    """A rendered prompt as (role, text) turns without the template's markers; unchanged for an unknown template."""
    for pattern in _TURN_PATTERNS:
        matches = list(pattern.finditer(prompt))
        # The pattern must cover the whole prompt, or something would be hidden from the reader.
        if matches and not pattern.sub("", prompt).replace("<|begin_of_text|>", "").strip():
            turns = [(match["role"], match["text"].strip("\n")) for match in matches]
            return turns[:-1] if len(turns) > 1 and not turns[-1][1] else turns
    return [("", prompt)]


def later_evaluations(record: RunRecord) -> list[LaterEvaluation]:
    """The evaluations by `tunebook eval`, the newest first."""
    return [
        LaterEvaluation(
            name=evaluation["when"],
            model=evaluation["model"],
            limit=f"the first {evaluation['limit']} items" if evaluation.get("limit") else "",
            lines=[
                (name, task["metric"].replace("_", " "), score_text(task, _unit(task)), f"{task['num_items']:,}")
                for name, task in evaluation["tasks"].items()
            ],
        )
        for evaluation in reversed(record.evaluations)
    ]


def failed_tasks(record: RunRecord) -> list[str]:
    """Tasks of the evaluations before and after training that failed, and why."""
    return [
        f"{name}, {when} training: {why}"
        for when, evaluation in (("before", record.before), ("after", record.after))
        for name, why in ((evaluation or {}).get("failed") or {}).items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One task's score, with all scores and answers of the same evaluation."""

    score: Mapping[str, Any]
    tasks: _Scores
    answers: Answers


def compare_scores(records: Sequence[RunRecord]) -> list[ScoreLine]:
    """Every task that any of the runs was evaluated on, a column per run. Changes are from the first run."""
    found = [_scores_of(record) for record in records]
    names = list(dict.fromkeys(name for scores in found for name in scores))
    return [_line(name, [scores.get(name) for scores in found]) for name in names]


def _scores_of(record: RunRecord) -> dict[str, _Found]:
    """Each task's score of the run's final model: after training, or from the newest later evaluation."""
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
    scores, first = [one.score for one in found if one is not None], found[0]
    unit = _unit(*scores)
    cells = []
    for one in found:
        if one is None:
            cells.append(Cell(text=NO_VALUE))
            continue
        change = ""
        if first is not None and one is not first:
            change = change_text(task_difference(name, first.tasks, one.tasks, first.answers, one.answers), unit)
        cells.append(Cell(text=score_text(one.score, unit), change=change, num_items=one.score["num_items"]))
    return ScoreLine(task=name, metric=scores[0]["metric"].replace("_", " "), cells=cells)


def program_lines(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """How programs that the model wrote ended, one line per task, and how they were executed."""
    codes = {when: (found or {}).get("code") for when, found in (("before", before), ("after", after))}
    lines = []
    for when, code in codes.items():
        for name, task in (code or {"tasks": {}})["tasks"].items():
            counts = ", ".join(f"{num:,} {status.replace('_', ' ')}" for status, num in task["statuses"].items())
            lines.append(f"{name}, {when} training: {counts}; at most {task['time_limit_s']:g} s each")
    return [*lines, *dict.fromkeys(_execution(code["execution"]) for code in codes.values() if code)]


def _execution(execution: dict[str, Any]) -> str:
    if execution["backend"] == "unsafe":
        return "Executed without a sandbox, as confirmed by confirm_run_unsafe_code"
    where = "the sandbox service" if execution["backend"] == "service" else execution["backend"]
    return f"Executed in {where}, each with at most {execution['limits']['memory_bytes'] >> 20} MiB of memory"
