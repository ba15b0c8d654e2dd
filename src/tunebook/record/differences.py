"""The difference between two scores with its standard error, paired by item where both answered the same items.

Two models that answer the same items agree on most of them, so only the items where they differ add noise. The error
of the paired differences is therefore usually smaller than the two scores' errors combined.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TOLERANCE = 1e-6  # between a score and the mean of its items' values. Metrics that are no means fail this check

Values = Mapping[Any, float]  # of a task's items, by number, or by task and number
Answers = Mapping[tuple[str, str | None], Values]  # by task and group of items


Difference = tuple[float, float | None]  # a new score minus an old one, and its standard error


def score_difference(
    old: Mapping[str, Any], new: Mapping[str, Any], old_values: Values | None = None, new_values: Values | None = None
) -> Difference:
    """The difference of two scores of one task or group. Each score has `value`, `stderr` and `num_items`."""
    value = new["value"] - old["value"]
    if old_values and new_values and _are_pairs(old, new, old_values, new_values):
        differences = [new_values[item] - old_values[item] for item in sorted(old_values)]
        return value, statistics.stdev(differences) / math.sqrt(len(differences))
    first, second = standard_error(old), standard_error(new)
    return value, None if first is None or second is None else math.hypot(first, second)


def task_difference(
    name: str,
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
    old_answers: Answers,
    new_answers: Answers,
    group: str | None = None,
) -> Difference:
    """The difference of one task, of a `group` of its items, or of the harness' score over several tasks.

    `old` and `new` are all scores of two evaluations, by task.
    """
    scores, values = [], []
    for tasks, answers in ((old, old_answers), (new, new_answers)):
        leaves = _leaves(name, tasks)
        score = tasks[name] if group is None else tasks[name]["groups"][group]
        scores.append({**score, "items_sha256": [tasks[leaf].get("items_sha256") for leaf in leaves]})
        found = {leaf: answers.get((leaf, group), {}) for leaf in leaves}
        values.append({(leaf, item): value for leaf, items in found.items() for item, value in items.items()})
    return score_difference(*scores, *values)


def _leaves(name: str, tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tasks that a score is computed from: its subtasks, or itself."""
    below = [leaf for child in tasks[name].get("subtasks") or () if child in tasks for leaf in _leaves(child, tasks)]
    return below or [name]


def is_share(*scores: Mapping[str, Any]) -> bool:
    """Whether all scores are shares of right answers, unlike a perplexity, or bits per byte, which may be below 1."""
    return all(score.get("higher_is_better") is not False and 0 <= score["value"] <= 1 for score in scores)


def score_in_words(score: Mapping[str, Any], *, as_share: bool) -> str:
    """A score with its recorded standard error, for a terminal."""
    value, error = score["value"], score.get("stderr")
    if as_share:
        return f"{100 * value:.1f}%" + ("" if error is None else f" ± {100 * error:.1f}")
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def standard_error(score: Mapping[str, Any]) -> float | None:
    """The standard error of a score. A share of right answers without one gets it by the harness' formula."""
    error: float | None = score.get("stderr")
    value, num_items = score["value"], score["num_items"]
    if error is None and 0 <= value <= 1 and num_items > 1:
        return math.sqrt(value * (1 - value) / (num_items - 1))
    return error


def read_answers(evaluation_folder: Path, when: str) -> Answers:
    """The value of every judged item of an evaluation. Empty if the answers are missing or unreadable."""
    found: dict[tuple[str, str | None], dict[int, float]] = {}
    try:
        with (evaluation_folder / f"{when}-answers.jsonl").open(encoding="utf-8") as lines:
            for answer in map(json.loads, lines):
                if answer["value"] is not None:
                    for group in {None, answer["group"]}:
                        found.setdefault((answer["task"], group), {})[answer["item"]] = answer["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found


def answers_of(folder: Path, evaluation: Mapping[str, Any] | None) -> Answers:
    """The answers of one of a run's evaluations, by its record."""
    when = None if evaluation is None else evaluation.get("when")
    return {} if when is None else read_answers(folder / "evaluation", when)


def _are_pairs(old: Mapping[str, Any], new: Mapping[str, Any], old_values: Values, new_values: Values) -> bool:
    """Whether both sets of values are of the same items and each score is the mean of its values."""
    is_same = old.get("items_sha256") == new.get("items_sha256") and old_values.keys() == new_values.keys()
    pairs = ((old, old_values), (new, new_values))
    return (
        is_same
        and len(old_values) > 1
        and all(abs(statistics.fmean(values.values()) - score["value"]) < _TOLERANCE for score, values in pairs)
    )


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
