"""The evaluations of a run as tables, for the report and the terminal: scores, their changes, samples.

Two models that answer the same items agree on most of them, so the standard error of a change is that of the items'
differences. Where the items are not known or not the same, both scores' errors are combined.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.record.page.numbers import MINUS, Unit, format_value

if TYPE_CHECKING:
    from tunebook.record.run_record import RunRecord

NUM_SAMPLES = 5
# How the chat templates of the recipes' models write a turn. Other prompts are shown unchanged.
_TURN_PATTERNS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)
_Record = Mapping[str, Any]  # of an evaluation
_Tasks = Mapping[str, Mapping[str, Any]]  # the scores of an evaluation
Answers = Mapping[tuple[str, str | None], Mapping[int, float]]  # values of items, by task and group of items
_MEAN_TOLERANCE = 1e-6  # between a score and the mean of its items' values: other metrics are not means


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
    has_bar: bool  # only if every score is a share

    @property
    def num_items(self) -> str:
        """The number of answered items if it is the same in all columns, else that of each column."""
        numbers = [score.num_items for score in self.scores if score is not None]
        return " / ".join(f"{number:,}" for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))


def score_rows(before: _Record, after: _Record, *answers: Answers) -> list[ScoreRow]:
    """Every task, each followed by its groups. A missing evaluation is empty. `answers`: those of both evaluations."""
    old, new = before.get("tasks", {}), after.get("tasks", {})
    names = list(dict.fromkeys([*new, *old]))
    rows = []
    for name in names:
        rows.append(_row(name, [old, new], answers))
        for group in dict.fromkeys(group for tasks in (new, old) for group in tasks.get(name, {}).get("groups") or {}):
            rows.append(_row(name, [old, new], answers, group))
    return rows


def _row(
    name: str,
    columns: Sequence[_Tasks],
    answers: Sequence[Answers] = (),
    group: str | None = None,
) -> ScoreRow:
    """The row of a task, or of a group of its items. Changes are from the first column."""
    tasks = [column.get(name) for column in columns]
    recorded = [task if task is None or group is None else (task.get("groups") or {}).get(group) for task in tasks]
    unit = unit_of(*filter(None, recorded), *filter(None, tasks))
    values = [answered.get((name, group), {}) for answered in answers] or [{} for _ in columns]
    # Other data of the same task has other items under the same numbers.
    hashes = [None if task is None else task.get("items_sha256") for task in tasks]
    scores: list[Score | None] = []
    for score, own_values, own_hash in zip(recorded, values, hashes, strict=True):
        if score is None:
            scores.append(None)
            continue
        change = ""
        if scores and recorded[0] is not None:
            error = _paired_error(recorded[0], score, values[0], own_values) if own_hash == hashes[0] else None
            change = _change(recorded[0], score, unit, error)
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
        has_bar=unit is Unit.share,
    )


def unit_of(*scores: Mapping[str, Any]) -> Unit:
    """Percent if all scores are shares of right answers; plain for others: a perplexity may also be below 1."""
    is_share = all(score.get("higher_is_better") is not False and 0 <= score["value"] <= 1 for score in scores)
    return Unit.share if is_share else Unit.plain


def score_text(score: Mapping[str, Any], unit: Unit) -> str:
    """A score with its standard error."""
    return format_value(score["value"], unit) + _error_text(standard_error(score), unit)


def standard_error(score: Mapping[str, Any]) -> float | None:
    """The standard error of a score. A share of right answers without one gets it by the harness' formula."""
    error: float | None = score.get("stderr")
    value, num_items = score["value"], score["num_items"]
    if error is None and 0 <= value <= 1 and num_items > 1:
        return math.sqrt(value * (1 - value) / (num_items - 1))
    return error


def answers_of(folder: Path, evaluation: _Record) -> Answers:
    """The value of every judged item of one of a run's evaluations; empty if its answers are missing or unreadable."""
    answers: dict[tuple[str, str | None], dict[int, float]] = {}
    try:
        with (folder / "evaluation" / f"{evaluation.get('when')}-answers.jsonl").open(encoding="utf-8") as lines:
            for answer in map(json.loads, lines):
                if answer["value"] is not None:
                    for group in {None, answer["group"]}:
                        answers.setdefault((answer["task"], group), {})[answer["item"]] = answer["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return answers


def _paired_error(
    old: Mapping[str, Any], new: Mapping[str, Any], old_values: Mapping[int, float], new_values: Mapping[int, float]
) -> float | None:
    """The standard error of the mean difference of the same items; None unless both scores are means of these items."""
    if len(old_values) < 2 or old_values.keys() != new_values.keys():
        return None
    for score, values in ((old, old_values), (new, new_values)):
        if abs(statistics.fmean(values.values()) - score["value"]) > _MEAN_TOLERANCE:
            return None
    differences = [new_values[item] - old_values[item] for item in old_values]
    return statistics.stdev(differences) / math.sqrt(len(differences))


def _change(old: Mapping[str, Any], new: Mapping[str, Any], unit: Unit, paired_error: float | None) -> str:
    """A difference with its sign and its standard error; for shares in percentage points."""
    value, errors = new["value"] - old["value"], (standard_error(old), standard_error(new))
    error = paired_error
    if error is None and None not in errors:
        error = math.hypot(*filter(None, errors))
    sign = "" if not value else "+" if value > 0 else MINUS
    if unit is Unit.share:
        return f"{sign}{100 * abs(value):.1f}{_error_text(error, unit)} points"
    return f"{sign}{format_value(abs(value))}{_error_text(error, unit)}"


def _error_text(error: float | None, unit: Unit) -> str:
    if error is None:
        return ""
    return f" ± {100 * error:.1f}" if unit is Unit.share else f" ± {format_value(error)}"


def mean_score(tasks: dict[str, dict[str, Any]]) -> tuple[float, bool] | None:
    """The mean over the tasks that are not part of a group, and whether higher is better.

    None without tasks, and if higher is better for some and worse for others.
    """
    within = {child for task in tasks.values() for child in task["subtasks"]}
    top = [task for name, task in tasks.items() if name not in within]
    directions = {task["higher_is_better"] is not False for task in top}
    if len(directions) != 1:
        return None
    return sum(task["value"] for task in top) / len(top), directions.pop()


def pair_samples(before: _Record, after: _Record) -> list[dict[str, Any]]:
    """Five samples, in the order that the evaluation chose, with the answers to the same item before and after.

    An answer is its text, and whether it is right: None if the metric does not judge single answers.
    """
    old, new = (
        {(sample["task"], sample["prompt"], sample.get("item")): sample for sample in evaluation.get("samples", [])}
        for evaluation in (before, after)
    )
    samples = []
    for key, shown in list((new or old).items())[:NUM_SAMPLES]:
        group = shown.get("group")
        pair = [(str(side[key]["answer"]), side[key]["correct"]) if key in side else None for side in (old, new)]
        samples.append(
            {
                "task": f"{shown['task']}: {group}" if group and group != shown["task"] else shown["task"],
                "images": shown.get("images", []),  # data URLs
                "turns": split_turns(shown["prompt"]), "expected": str(shown["expected"]),
                "before": pair[0], "after": pair[1],
            }
        )  # fmt: skip
    return samples


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
    evaluations = []
    for evaluation in reversed(record.evaluations):
        limit = f", the first {evaluation['limit']} items" if evaluation.get("limit") else ""
        rows = [_row(name, [evaluation["tasks"]]) for name in evaluation["tasks"]]
        evaluations.append((evaluation["when"], evaluation["model"] + limit, rows))
    return evaluations
