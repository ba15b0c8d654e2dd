"""`contamination.json` in a run folder: which evaluation and validation items are in the training documents.

It is written before the training, and extended by later evaluations of other tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.evaluate.contamination.items import MAX_ITEMS_WITH_RUN, Item, ItemGroup
from tunebook.evaluate.contamination.search import MAX_DOCUMENTS_WITH_RUN, MAX_SHARE_WITH_RUN, NONE, Found
from tunebook.evaluate.contamination.words import ANCHOR, GRAM, words_of
from tunebook.files import atomic_write_json
from tunebook.record.contamination import CONTAMINATION_FILE, FORMAT, KINDS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
    import numpy as np

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
    import numpy as np

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
