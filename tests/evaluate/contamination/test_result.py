from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tunebook.evaluate.contamination.items import Item, ItemGroup
from tunebook.evaluate.contamination.result import (
    as_ranges,
    from_ranges,
    group_results,
    items_hash,
    write_result,
)
from tunebook.evaluate.contamination.search import NONE, Found
from tunebook.record.contamination import read_contamination


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 8, 9], "0-2 5 8-9"), ([9, 8, 1], "1 8-9")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert as_ranges(numbers) == text
    assert from_ranges(text) == set(numbers)


def test_each_group_gets_its_own_items() -> None:
    """Of `a`: exact, half of it, a passage; of `b`: a tenth, nothing."""
    a = ItemGroup(name="a", items=[Item(number=n, question=(f"question {n}",)) for n in (0, 1, 7)], num_all=3)
    b = ItemGroup(name="b", items=[Item(number=n, question=("a " * 200,)) for n in (0, 1)], num_all=50)
    found = Found(
        exact_in=np.array([4, NONE, NONE, NONE, NONE]),
        num_grams=np.array([10, 10, 10, 10, 0]),
        num_found=np.array([10, 5, 9, 1, 0]),
        num_in_passage=np.array([0, 0, 9, 0, 0]),
        part_in=np.array([4, 2, 3, 9, NONE]),
    )
    first, second = group_results([a, b], found, lambda number: f"train.jsonl:{number + 1}")
    assert [first[f"num_{kind}"] for kind in ("exact", "overlapping", "shared_passage", "clean", "half")] == [
        1,
        1,
        1,
        0,
        1,
    ]
    assert first["items"] == {"exact": "0", "overlapping": "1", "shared_passage": "7"}
    assert [(one["kind"], one["share"], one["document"]) for one in first["examples"]] == [
        ("exact", 1.0, "train.jsonl:5"),
        ("overlapping", 0.5, "train.jsonl:3"),
        ("shared_passage", 0.9, "train.jsonl:4"),
    ]
    assert (first["num_short"], first["mean_share"], second["mean_share"]) == (3, 0.5, 0.1)
    assert [second[f"num_{kind}"] for kind in ("items", "all", "overlapping", "half", "clean")] == [2, 50, 1, 0, 1]
    assert len(second["examples"][0]["text"]) == 200


def test_the_hash_is_of_every_text() -> None:
    def hash_of(item: Item) -> str:
        return items_hash(ItemGroup(name="a", items=[item], num_all=1))

    one = Item(number=0, question=("q",), answers=("a",))
    others = [Item(number=1, question=("q",), answers=("a",)), Item(number=0, question=("q",), others=("a",))]
    assert len({hash_of(item) for item in (one, *others)}) == 3
    assert hash_of(Item(number=0, question=("\ud800",))), "a lone surrogate"


def test_a_result_of_another_format_is_not_reused(tmp_path: Path) -> None:
    assert read_contamination(tmp_path) is None
    write_result(tmp_path, {"groups": {}})
    found = read_contamination(tmp_path)
    assert found is not None
    assert found["method"]["words_in_run"] == 13
    (tmp_path / "contamination.json").write_text('{"format": 0}')
    assert read_contamination(tmp_path) is None
