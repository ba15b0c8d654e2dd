"""The scores of an evaluation on clean items and on those that are in the training documents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tunebook.evaluate.contamination.result import from_ranges
from tunebook.evaluate.results import Answer
from tunebook.record.contamination import KINDS

_TOLERANCE = 1e-6  # between a score and the mean of its items' values. Metrics that are no means fail this check


def with_scores(
    result: Mapping[str, Any] | None, answers: Mapping[str, Sequence[Answer]], scores: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return what an evaluation's record says about contamination: counts and scores of each task."""
    if result is None:
        return None
    tasks = {
        name: {key: value for key, value in group.items() if key.startswith("num_") or key == "examples"}
        | {"scores": split_scores(group, answers.get(name, []), scores.get(name))}
        for name, group in result["groups"].items()
        if name in answers
    }
    return {"not_checked": result["not_checked"], "num_documents": result["num_documents"], "tasks": tasks}


def split_scores(
    group: Mapping[str, Any], answers: Sequence[Answer], score: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """The mean with its standard error on the items of each kind that there are.

    Empty if every item is of one kind, and for a metric that is no mean of its items' values, such as a perplexity.
    """
    values = {answer.item: answer.value for answer in answers if answer.value is not None}
    if score is None or not values or abs(statistics.fmean(values.values()) - score["value"]) > _TOLERANCE:
        return {}
    kinds = {number: kind for kind in KINDS for number in from_ranges(group["items"][kind])}
    found = {
        kind: [value for number, value in values.items() if kinds.get(number, "clean") == kind]
        for kind in ("clean", *KINDS)
    }
    return {kind: _mean(some) for kind, some in found.items() if some} if kinds.keys() & values.keys() else {}


def _mean(values: Sequence[float]) -> dict[str, Any]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": statistics.fmean(values), "stderr": error, "num_items": len(values)}
