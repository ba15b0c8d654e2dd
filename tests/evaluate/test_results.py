from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import TunebookError
from tunebook.evaluate.results import (
    Answer,
    choose_samples,
    is_evaluated,
    task_answers,
    task_scores,
)
from tunebook.record.scores import mean_score


def sample(prompt: str, answer: str, expected: str, group: str | None, filter_name: str = "strip") -> dict[str, Any]:
    return {
        "doc": {"prompt": prompt} | ({} if group is None else {"task": group}),
        "target": expected,
        "arguments": [(prompt, {"until": ["<eos>"]})],
        "filtered_resps": [answer],
        "filter": filter_name,
        "exact_match": float(answer == expected),
        "doc_hash": f"hash of {prompt}",
    }


def results(samples: list[dict[str, Any]], **metrics: object) -> dict[str, Any]:
    return {
        "results": {"words": {"name": "words", "alias": "words", "sample_len": len(samples), **metrics}},
        "configs": {"words": {"metric_list": [{"metric": "exact_match"}], "metadata": {"version": 1}}},
        "versions": {"words": 1.0},
        "n-shot": {"words": 0},
        "higher_is_better": {"words": {"exact_match": True}},
        "group_subtasks": {},
        "samples": {"words": samples},
    }


def answer(prompt: str, *, correct: bool | None = True, group: str | None = None) -> Answer:
    value = None if correct is None else float(correct)
    return Answer(task="words", group=group, prompt=prompt, answer="a", expected="e", value=value, correct=correct)


def test_the_score_its_error_and_the_groups_are_kept() -> None:
    samples = [sample("1", "x", "x", "a"), sample("2", "x", "y", "a"), sample("3", "z", "z", "b")]
    found = task_scores(results(samples, **{"exact_match,strip": 2 / 3, "exact_match_stderr,strip": 1 / 3}))["words"]
    assert found["groups"] == {"a": {"value": 0.5, "num_items": 2}, "b": {"value": 1.0, "num_items": 1}}
    kept = {key: found[key] for key in ("metric", "value", "stderr", "num_items", "filter", "version", "subtasks")}
    assert kept == {
        "metric": "exact_match",
        "value": 2 / 3,
        "stderr": 1 / 3,
        "num_items": 3,
        "filter": "strip",
        "version": 1.0,
        "subtasks": [],
    }


def test_the_first_filter_of_the_first_listed_metric_is_the_main_one() -> None:
    samples = [sample("1", "x", "x", None, "strip"), sample("1", "w", "x", None, "last")]
    metrics = {"f1,strip": 0.1, "exact_match,strip": 1.0, "exact_match_stderr,strip": "N/A", "exact_match,last": 0.0}
    found = task_scores(results(samples, **metrics))["words"]
    assert (found["value"], found["stderr"], found["groups"]) == (1.0, None, {})
    assert [given.answer for given in task_answers("words", results(samples, **metrics))] == ["x"]


def test_of_several_choices_the_likeliest_is_the_answer() -> None:
    multiple = {
        "doc": {},
        "target": 1,
        "arguments": [("sky", " green"), ("sky", " blue"), ("sky", " red")],
        "filtered_resps": [(-3.0, False), (-2.0, False), (-1.5, True)],
        "filter": "strip",
        "exact_match": 0.0,
        "doc_hash": "h",
    }
    (found,) = task_answers("words", results([multiple], **{"exact_match,strip": 0.0}))
    assert (found.answer, found.expected, found.correct) == ("red", "blue", False)


def test_a_wrong_answer_is_shown_if_there_is_one() -> None:
    answers = [answer(f"p{number}") for number in range(20)]
    unseen = next(given for given in answers if given.prompt not in {s["prompt"] for s in choose_samples(answers)})
    answers[answers.index(unseen)] = answer(unseen.prompt, correct=False)
    assert [sample["correct"] for sample in choose_samples(answers)] == [True, True, True, True, False]


def task(value: float, higher: bool | None = True, subtasks: list[str] | None = None) -> dict[str, Any]:
    return {"value": value, "higher_is_better": higher, "subtasks": subtasks or []}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({}, None),
        ({"a": task(0.5), "b": task(1.0)}, (0.75, True)),
        ({"a": task(3.0, False)}, (3.0, False)),
        ({"a": task(3.0, False), "b": task(1.0)}, None),
        ({"all": task(0.5, subtasks=["a", "b"]), "a": task(0.1), "b": task(0.9), "c": task(1.0)}, (0.75, True)),
    ],
)
def test_the_mean_counts_no_task_twice_and_mixes_no_directions(
    tasks: dict[str, dict[str, Any]], expected: tuple[float, bool] | None
) -> None:
    assert mean_score(tasks) == expected


def test_every_generated_text_is_kept_and_of_choices_their_likelihoods() -> None:
    generated = sample("1", "x", "x", None) | {"resps": [["x", "y"]], "doc_id": 7}
    (found,) = task_answers("words", results([generated], **{"exact_match,strip": 1.0}))
    assert (found.item, found.responses) == (7, ["x", "y"])
    chosen = sample("1", "x", "x", None) | {"resps": [[(-1.5, True)], [(float("-inf"), False)]]}
    (found,) = task_answers("words", results([chosen], **{"exact_match,strip": 1.0}))
    assert found.responses == [-1.5, None]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error_and_its_error_is_left_out(value: float) -> None:
    with pytest.raises(TunebookError, match=f"the exact_match of words is {value}: most likely") as raised:
        task_scores(results([], **{"exact_match,strip": value}))
    assert raised.value.problem_id == "score-not-finite"
    found = task_scores(results([], **{"exact_match,strip": 1.0, "exact_match_stderr,strip": value}))
    assert found["words"]["stderr"] is None


def test_an_evaluation_is_finished_when_no_task_of_it_failed(tmp_path: Path) -> None:
    assert not is_evaluated(tmp_path, "before")
    (tmp_path / "evaluation").mkdir()
    file = tmp_path / "evaluation" / "before.json"
    for text, expected in (('{"failed": {}}', True), ('{"failed": {"a": "why"}}', False), ("{}", True)):
        file.write_text(text)
        assert is_evaluated(tmp_path, "before") is expected


def test_the_limit_of_new_tokens_is_kept_of_generated_texts() -> None:
    generated = sample("p", "one", "one", None) | {"resps": [["one", "two"]]}
    (found,) = task_answers("words", results([generated], **{"exact_match,strip": 1.0}))
    assert (found.responses, found.max_new_tokens) == (["one", "two"], 256)
    chosen = sample("p", "one", "one", None) | {"resps": [[(-1.5, True)]], "arguments": [("p", " one")]}
    (found,) = task_answers("words", results([chosen], **{"exact_match,strip": 1.0}))
    assert found.max_new_tokens is None
