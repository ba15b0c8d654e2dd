from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.record.differences import (
    answers_of,
    mean_score,
    read_answers,
    score_difference,
    standard_error,
    task_difference,
)


def score(value: float, stderr: float | None, num_items: int = 4, **more: Any) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "num_items": num_items, "items_sha256": "same"} | more


OLD, NEW = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}, {0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0}


def test_the_error_of_a_difference_is_that_of_the_paired_items() -> None:
    found = score_difference(score(0.5, 0.289), score(0.75, 0.25), OLD, NEW)
    # 0 1 0 0: a standard deviation of 1/2, over sqrt(4)
    assert found == (0.25, pytest.approx(0.25))


@pytest.mark.parametrize(
    ("old", "new", "old_values", "new_values"),
    [
        (score(0.5, 0.3), score(0.75, 0.4), None, None),
        (score(0.5, 0.3), score(0.75, 0.4), {}, NEW),
        (score(0.5, 0.3), score(0.75, 0.4, items_sha256="other"), OLD, NEW),  # the data changed in between
        (score(0.5, 0.3), score(0.75, 0.4), OLD, {0: 1.0, 1: 0.5}),  # a limit
        (score(0.5, 0.3), score(0.7, 0.4), OLD, NEW),  # a metric that is not the mean of its items' values
    ],
    ids=["no answers", "answers of one", "other items", "fewer items", "no mean"],
)
def test_unpaired_scores_combine_both_errors(
    old: dict[str, Any], new: dict[str, Any], old_values: dict[int, float], new_values: dict[int, float]
) -> None:
    found = score_difference(old, new, old_values, new_values)
    assert found == (pytest.approx(new["value"] - 0.5), pytest.approx(0.5))  # sqrt(0.09 + 0.16)


def test_without_an_error_of_one_score_there_is_none_of_the_difference() -> None:
    assert score_difference(score(31.0, None), score(12.0, 0.5))[1] is None


def test_a_share_without_an_error_has_that_of_right_and_wrong_answers() -> None:
    # sqrt(0.8 x 0.2 / (5 - 1)) = 0.2
    assert standard_error(score(0.8, None, 5)) == pytest.approx(0.2)
    assert standard_error({"value": 0.8, "num_items": 5}) == pytest.approx(0.2)
    assert standard_error(score(0.8, 0.1, 5)) == 0.1
    assert standard_error(score(31.0, None, 5)) is None
    assert standard_error(score(1.0, None, 1)) is None


def test_answers_are_read_by_task_and_by_group_of_items(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    answers = [
        {"task": "a", "group": "x", "item": 0, "value": 1.0},
        {"task": "a", "group": "y", "item": 1, "value": 0.0},
        {"task": "b", "group": None, "item": 0, "value": 0.5},
        {"task": "b", "group": None, "item": 1, "value": None},  # the metric does not judge single items
    ]
    (folder / "after-answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    assert answers_of(tmp_path, {"when": "after"}) == {
        ("a", None): {0: 1.0, 1: 0.0},
        ("a", "x"): {0: 1.0},
        ("a", "y"): {1: 0.0},
        ("b", None): {0: 0.5},
    }
    assert answers_of(tmp_path, None) == {}


@pytest.mark.parametrize("text", [None, "no JSON", '{"task": "a", "value": 1.0, "group": null}\n'])
def test_answers_that_cannot_be_read_are_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:  # the last one is of a version that did not number its items
        (tmp_path / "after-answers.jsonl").write_text(text)
    assert read_answers(tmp_path, "after") == {}


def test_a_score_of_several_tasks_is_paired_over_the_items_of_all_of_them() -> None:
    def tasks(first: float, second: float, both: float) -> dict[str, Any]:
        return {
            "both": score(both, 0.1, 4, subtasks=["inner", "second"], items_sha256=None),
            "inner": score(first, 0.1, 2, subtasks=["first"], items_sha256=None),
            "first": score(first, 0.1, 2),
            "second": score(second, 0.1, 2),
        }

    old, new = tasks(0.5, 0.0, 0.25), tasks(1.0, 0.5, 0.75)
    old_answers = {("first", None): {0: 1.0, 1: 0.0}, ("second", None): {0: 0.0, 1: 0.0}}
    new_answers = {("first", None): {0: 1.0, 1: 1.0}, ("second", None): {0: 0.0, 1: 1.0}}
    found = task_difference("both", old, new, old_answers, new_answers)
    # 0 1 0 1: a standard deviation of sqrt(1/3), over sqrt(4)
    assert found == (0.5, pytest.approx((1 / 3) ** 0.5 / 2))
    assert task_difference("inner", old, new, old_answers, new_answers)[1] == pytest.approx(0.5)
    new["second"]["items_sha256"] = "other"
    unpaired = pytest.approx(0.02**0.5)  # both errors of 0.1
    assert task_difference("both", old, new, old_answers, new_answers)[1] == unpaired
    unweighted = tasks(1.0, 0.5, 0.8)  # each task counts as much, whatever its size
    assert task_difference("both", old, unweighted, old_answers, new_answers)[1] == unpaired


def task(value: float, higher: bool | None = True, subtasks: list[str] | None = None) -> dict[str, Any]:
    return {"value": value, "higher_is_better": higher, "subtasks": subtasks or []}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({}, None),
        ({"a": task(3.0, False)}, (3.0, False)),
        ({"a": task(3.0, False), "b": task(1.0)}, None),
        ({"all": task(0.5, subtasks=["a", "b"]), "a": task(0.1), "b": task(0.9), "c": task(1.0)}, (0.75, True)),
    ],
)
def test_a_mean_score_counts_no_task_twice_and_mixes_no_directions(
    tasks: dict[str, dict[str, Any]], expected: tuple[float, bool] | None
) -> None:
    assert mean_score(tasks) == expected
