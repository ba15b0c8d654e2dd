from __future__ import annotations

import math

import pytest

from tunebook.evaluate.contamination.scores import split_scores, with_scores
from tunebook.evaluate.results import Answer


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
