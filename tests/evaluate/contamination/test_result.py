from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tunebook.evaluate.contamination.items import Item, ItemGroup
from tunebook.evaluate.contamination.result import (
    as_ranges,
    from_ranges,
    group_results,
    items_hash,
    split_scores,
    with_scores,
    write_result,
)
from tunebook.evaluate.contamination.search import NONE, Found
from tunebook.evaluate.results import Answer
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


def answer(item: int, value: float | None) -> Answer:
    return Answer(task="t", group=None, prompt="", answer="", expected="", value=value, correct=None, item=item)


ANSWERS = [answer(item, value) for item, value in enumerate([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])]
GROUP = {"items": {"exact": "2-3", "overlapping": "", "shared_passage": "5"}, "num_items": 6, "items_sha256": "x"}


def test_each_kind_of_item_has_its_mean_and_error() -> None:
    found = split_scores(GROUP, ANSWERS, {"value": 0.5})
    assert found == {
        "clean": {
            "value": pytest.approx(1 / 3),
            "stderr": pytest.approx(math.sqrt(1 / 3) / math.sqrt(3)),
            "num_items": 3,
        },
        "exact": {"value": 1.0, "stderr": 0.0, "num_items": 2},
        "shared_passage": {"value": 0.0, "stderr": None, "num_items": 1},
    }


@pytest.mark.parametrize(
    ("group", "answers", "score"),
    [
        ({**GROUP, "items": dict.fromkeys(GROUP["items"], "")}, ANSWERS, {"value": 0.5}),
        (GROUP, ANSWERS, {"value": 12.7}),  # a perplexity
        (GROUP, [answer(0, None)], {"value": 0.5}),
        (GROUP, [], {"value": 0.5}),
        (GROUP, ANSWERS, None),
    ],
    ids=["all clean", "no mean", "not judged", "no answers", "no score"],
)
def test_nothing_to_tell_apart(group, answers, score) -> None:
    assert split_scores(group, answers, score) == {}


def test_the_record_of_an_evaluation_has_counts_and_scores_of_its_tasks() -> None:
    result = {"not_checked": None, "num_documents": 9, "groups": {"t": {**GROUP, "examples": []}, "validation": GROUP}}
    found = with_scores(result, {"t": ANSWERS}, {"t": {"value": 0.5}})
    assert found is not None
    assert list(found["tasks"]) == ["t"]
    assert found["tasks"]["t"].keys() == {"num_items", "examples", "scores"}
    assert with_scores(None, {}, {}) is None
