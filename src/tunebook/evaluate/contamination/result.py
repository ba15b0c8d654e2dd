"""`contamination.json` in a run folder: which evaluation and validation items are in the training documents.

It is written before the training, and extended by later evaluations of other tasks. Evaluations report their scores on
clean items and on those that are in the training documents.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunebook.evaluate.contamination.items import MAX_ITEMS_WITH_RUN, Item, ItemGroup
from tunebook.evaluate.contamination.search import MAX_DOCUMENTS_WITH_RUN, MAX_SHARE_WITH_RUN, NONE, Found
from tunebook.evaluate.contamination.words import ANCHOR, GRAM, words_of
from tunebook.evaluate.results import Answer, mean_with_error
from tunebook.files import atomic_write_json
from tunebook.record.contamination import CONTAMINATION_FILE, FORMAT, KINDS

NUM_EXAMPLES = 3  # of each group
_EXCERPT = 200  # characters of an item
METHOD = {
    "words_in_run": GRAM,
    "words_of_short_question": ANCHOR,
    "max_items_with_run": MAX_ITEMS_WITH_RUN,
    "max_documents_with_run": MAX_DOCUMENTS_WITH_RUN,
    "max_share_of_documents_with_run": MAX_SHARE_WITH_RUN,
}


def write_result(run: Path, result: Mapping[str, Any]) -> None:
    """Write a run's file."""
    atomic_write_json(run / CONTAMINATION_FILE, {"format": FORMAT, "method": METHOD, **result})


def items_hash(group: ItemGroup) -> str:
    """Hash all texts of a group's items."""
    found = hashlib.sha256()
    for item in group.items:
        found.update(repr((item.number, item.question, item.answers, item.others)).encode("utf-8", "backslashreplace"))
    return found.hexdigest()


def group_results(groups: Sequence[ItemGroup], found: Found, origin: Callable[[int], str]) -> list[dict[str, Any]]:
    """Each group's counts, the items of each kind, and examples with the `origin` of the training document."""
    results, start = [], 0
    for group in groups:
        rows = slice(start, start + len(group.items))
        results.append(_group_result(group, Found(**{key: value[rows] for key, value in vars(found).items()}), origin))
        start = rows.stop
    return results


def _group_result(group: ItemGroup, found: Found, origin: Callable[[int], str]) -> dict[str, Any]:

    is_exact = found.exact_in != NONE
    is_part = ~is_exact & (found.num_found > 0)
    is_passage = is_part & (found.num_found == found.num_in_passage)
    is_overlapping = is_part & ~is_passage
    masks = {"exact": is_exact, "overlapping": is_overlapping, "shared_passage": is_passage}
    shares = found.num_found / np.maximum(found.num_grams, 1)
    numbers = np.array([item.number for item in group.items], dtype=np.int64)
    return {
        "items_sha256": items_hash(group),
        "num_all": group.num_all,
        "num_items": len(group.items),
        **{f"num_{kind}": int(mask.sum()) for kind, mask in masks.items()},
        "num_clean": int((~is_exact & ~is_part).sum()),
        "num_half": int((is_overlapping & (shares >= 0.5)).sum()),
        "num_short": sum(_num_words(item) < ANCHOR for item in group.items),
        "mean_share": round(float(shares[is_overlapping].mean()), 4) if is_overlapping.any() else None,
        "items": {kind: as_ranges(numbers[mask].tolist()) for kind, mask in masks.items()},
        "examples": _examples(group, masks, shares, found, origin),
    }


def _num_words(item: Item) -> int:
    return sum(len(words_of(text)) for text in item.question)


def _examples(
    group: ItemGroup,
    masks: Mapping[str, npt.NDArray[np.bool_]],
    shares: npt.NDArray[np.float64],
    found: Found,
    origin: Callable[[int], str],
) -> list[dict[str, Any]]:
    """A few items: exact ones first, then those with the largest share."""
    examples: list[dict[str, Any]] = []
    for kind in KINDS:
        chosen = np.flatnonzero(masks[kind])
        for place in chosen[np.argsort(-shares[chosen], kind="stable")][: NUM_EXAMPLES - len(examples)].tolist():
            document = int((found.exact_in if kind == "exact" else found.part_in)[place])
            item = group.items[place]
            examples.append(
                {
                    "item": item.number,
                    "kind": kind,
                    "share": round(float(shares[place]), 4) if found.num_grams[place] else None,
                    "text": _excerpt(item),
                    "document": origin(document),
                }
            )
    return examples


def _excerpt(item: Item) -> str:
    """The question in one line, its shortest field first: a long passage says less about the item."""
    text = " / ".join(" ".join(field.split()) for field in sorted(item.question, key=len))
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 3] + "..."


def as_ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as text: [0, 1, 2, 5] -> `0-2 5`."""
    ordered = sorted(numbers)
    breaks = [place for place, (one, other) in enumerate(pairwise(ordered), 1) if other != one + 1]
    parts = [ordered[start:end] for start, end in pairwise([0, *breaks, len(ordered)])] if ordered else []
    return " ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def from_ranges(text: str) -> set[int]:
    """The numbers that `as_ranges` wrote."""
    ends = [tuple(map(int, part.split("-"))) for part in text.split()]
    return {number for end in ends for number in range(end[0], end[-1] + 1)}


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
    if not kinds.keys() & values.keys():
        return {}
    return {kind: {**mean_with_error(some), "num_items": len(some)} for kind, some in found.items() if some}
