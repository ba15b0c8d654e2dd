"""The evaluations in a report: scores before and after training and of later evaluations, samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.record.differences import Answers, Difference, answers_of, is_share, standard_error, task_difference
from tunebook.record.page.numbers import MINUS, Unit, format_value
from tunebook.record.run_record import RunRecord

NUM_SAMPLES = 5
FINAL_MODEL = "model"  # how a record names a run's own final model
# How the chat templates of the recipes' models write a turn. Other prompts are shown unchanged.
_TURN_PATTERNS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)
_Scores = Mapping[str, Mapping[str, Any]]  # of one evaluation, by task
_Column = dict[str, tuple[_Scores, Answers]]  # the evaluation of each task that a column of the table shows


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score with its standard error."""

    value: float
    standard_error: float | None
    text: str
    num_items: int
    change: str  # from the first score of the row; empty in it, and if either is missing


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One line of a table: a task, or one group of its items, with a score per column."""

    name: str
    is_group: bool
    metric: str
    scores: list[Score | None]
    baseline: float | None  # drawn as a tick on the bar
    has_bar: bool  # only if every score is a share

    @property
    def num_items(self) -> str:
        """The number of answered items if it is the same in all columns, else that of each column."""
        numbers = [score.num_items for score in self.scores if score is not None]
        return " / ".join(f"{number:,}" for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))


def score_rows(
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    answers_before: Answers | None = None,
    answers_after: Answers | None = None,
) -> list[ScoreRow]:
    """Every task, each followed by its groups. The change is paired by item if both evaluations have answers."""
    old, new = (before or {}).get("tasks", {}), (after or {}).get("tasks", {})
    columns = [dict.fromkeys(old, (old, answers_before or {})), dict.fromkeys(new, (new, answers_after or {}))]
    names = list(dict.fromkeys([*new, *old]))
    # A baseline does not name its task, so it is drawn only if there is a single one.
    baseline = (baseline_of(before, after) or {}) if len(names) == 1 else {}
    rows = []
    for name in names:
        rows.append(_row(name, columns, baseline=baseline.get("value")))
        for group in dict.fromkeys(group for tasks in (new, old) for group in tasks.get(name, {}).get("groups") or {}):
            level = baseline.get("groups", {}).get(group, {}).get("value")
            rows.append(_row(name, columns, group, baseline=level))
    return rows


def _row(name: str, columns: Sequence[_Column], group: str | None = None, *, baseline: float | None = None) -> ScoreRow:
    """The row of a task, or of a group of its items. Changes are from the first column."""
    tasks = [column[name][0][name] if name in column else None for column in columns]
    found = [task if task is None or group is None else (task.get("groups") or {}).get(group) for task in tasks]
    unit = unit_of(*filter(None, found), *filter(None, tasks))
    scores: list[Score | None] = []
    for score, column in zip(found, columns, strict=True):
        if score is None:
            scores.append(None)
            continue
        change = ""
        if scores and found[0] is not None:
            (old, old_answers), (new, new_answers) = columns[0][name], column[name]
            change = _change_text(task_difference(name, old, new, old_answers, new_answers, group), unit)
        scores.append(
            Score(
                value=score["value"], standard_error=standard_error(score), text=score_text(score, unit),
                num_items=score["num_items"], change=change,
            )
        )  # fmt: skip
    return ScoreRow(
        name=name if group is None else group,
        is_group=group is not None,
        metric=" / ".join(dict.fromkeys(task["metric"] for task in tasks if task is not None)),
        scores=scores,
        baseline=baseline if unit is Unit.share else None,
        has_bar=unit is Unit.share,
    )


def unit_of(*scores: Mapping[str, Any]) -> Unit:
    """Percent for shares of right answers; plain for other scores, such as a perplexity."""
    return Unit.share if is_share(*scores) else Unit.plain


def score_text(score: Mapping[str, Any], unit: Unit) -> str:
    """A score with its standard error."""
    error, text = standard_error(score), format_value(score["value"], unit)
    if error is None:
        return text
    return text + (f" ± {100 * error:.1f}" if unit is Unit.share else f" ± {format_value(error)}")


def _change_text(difference: Difference, unit: Unit) -> str:
    """A difference with its sign and standard error; for shares in percentage points."""
    value, error = difference
    sign, value = "" if not value else "+" if value > 0 else MINUS, abs(value)
    if unit is Unit.share:
        return f"{sign}{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}") + " points"
    return f"{sign}{format_value(value)}" + ("" if error is None else f" ± {format_value(error)}")


def baseline_of(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """The baseline of the evaluations: `name`, `value` and `groups`; None without one."""
    return (after or {}).get("baseline") or (before or {}).get("baseline")


def pair_samples(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Five samples, in the order that the evaluation chose, with the answers to the same prompt before and after.

    An answer is its text, and whether it is right: None if the metric does not judge single answers.
    """
    old, new = (
        {(sample["task"], sample["prompt"]): sample for sample in (evaluation or {}).get("samples", [])}
        for evaluation in (before, after)
    )
    found = []
    for key, shown in list((new or old).items())[:NUM_SAMPLES]:
        group = shown.get("group")
        pair = [(str(side[key]["answer"]), side[key]["correct"]) if key in side else None for side in (old, new)]
        found.append(
            {
                "task": f"{shown['task']}: {group}" if group and group != shown["task"] else shown["task"],
                "turns": split_turns(shown["prompt"]), "expected": str(shown["expected"]),
                "before": pair[0], "after": pair[1],
            }
        )  # fmt: skip
    return found


def split_turns(prompt: str) -> list[tuple[str, str]]:
    """A rendered prompt as (role, text) turns without the template's markers; unchanged for an unknown template."""
    for pattern in _TURN_PATTERNS:
        matches = list(pattern.finditer(prompt))
        # The pattern must cover the whole prompt, or something would be hidden from the reader.
        if matches and not pattern.sub("", prompt).replace("<|begin_of_text|>", "").strip():
            turns = [(match["role"], match["text"].strip("\n")) for match in matches]
            return turns[:-1] if len(turns) > 1 and not turns[-1][1] else turns
    return [("", prompt)]


def later_evaluations(record: RunRecord) -> list[tuple[str, str, list[ScoreRow]]]:
    """The evaluations by `tunebook eval`, the newest first: name, what was evaluated, a row per task."""
    found = []
    for evaluation in reversed(record.evaluations):
        limit = f", the first {evaluation['limit']} items" if evaluation.get("limit") else ""
        column: _Column = dict.fromkeys(evaluation["tasks"], (evaluation["tasks"], {}))
        found.append((evaluation["when"], evaluation["model"] + limit, [_row(name, [column]) for name in column]))
    return found


def compare_scores(records: Sequence[RunRecord]) -> list[ScoreRow]:
    """Every task that any of the runs was evaluated on, a column per run. Changes are from the first run.

    The score is that of the run's final model: after training, or from the newest later evaluation.
    """
    columns: list[_Column] = []
    for record in records:
        later = [evaluation for evaluation in record.evaluations if evaluation["model"] == FINAL_MODEL]
        column: _Column = {}
        for evaluation in filter(None, (record.after, *reversed(later))):
            found = evaluation["tasks"], answers_of(record.folder, evaluation)
            column |= {name: found for name in evaluation["tasks"] if name not in column}
        columns.append(column)
    return [_row(name, columns) for name in dict.fromkeys(name for column in columns for name in column)]
