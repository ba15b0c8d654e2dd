from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.results import (
    Answer,
    choose_samples,
    is_evaluated,
    task_answers,
    task_scores,
)


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


def test_the_first_filter_of_the_first_listed_metric_is_the_main_one() -> None:
    samples = [sample("1", "x", "x", None, "strip"), sample("1", "w", "x", None, "last")]
    metrics = {"f1,strip": 0.1, "exact_match,strip": 1.0, "exact_match_stderr,strip": "N/A", "exact_match,last": 0.0}
    score = task_scores(results(samples, **metrics))["words"]
    assert (score["value"], score["stderr"], score["groups"]) == (1.0, None, {})
    assert [given.answer for given in task_answers("words", results(samples, **metrics))] == ["x"]


def test_a_task_whose_metric_is_not_computed_is_an_error_and_a_group_without_one_is_not() -> None:
    with pytest.raises(RequestError) as raised:
        task_scores(results([sample("1", "x", "x", None)]))
    assert raised.value.problem_id == "task-without-score"
    assert task_scores(results([])) == {}


def test_the_samples_are_the_same_before_and_after_training() -> None:
    before, after = (
        [
            Answer(task="t", group=None, prompt=f"p{number}", answer="a", expected="e", value=value, correct=value > 0)
            for number in range(20)
        ]
        for value in (0.0, 1.0)
    )
    chosen = [[sample["prompt"] for sample in choose_samples(answers)] for answers in (before, after[::-1])]
    assert chosen[0] == chosen[1] and len(chosen[0]) == 5


def test_samples_are_of_several_questions_if_many_images_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebook.evaluate.results.thumbnail", str)
    answers = [
        Answer(
            task="t", group=None, prompt="ABC"[number % 3], answer="a", expected="e", value=0.0, correct=False,
            images=[f"{number:064d} /nowhere/{number}.png"],
        )
        for number in range(60)
    ]  # fmt: skip
    assert {sample["prompt"] for sample in choose_samples(answers)} == {*"ABC"}


def test_every_generated_text_is_kept_and_of_choices_their_likelihoods() -> None:
    generated = sample("1", "x", "x", None) | {"resps": [["x", "y"]], "doc_id": 7}
    (answer,) = task_answers("words", results([generated], **{"exact_match,strip": 1.0}))
    assert (answer.item, answer.responses, answer.max_new_tokens) == (7, ["x", "y"], 256)
    chosen = sample("1", "x", "x", None) | {"resps": [[(-1.5, True)], [(float("-inf"), False)]]}
    chosen |= {"arguments": [("1", " x")]}
    (answer,) = task_answers("words", results([chosen], **{"exact_match,strip": 1.0}))
    assert (answer.responses, answer.max_new_tokens) == ([-1.5, None], None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error_and_its_error_is_left_out(value: float) -> None:
    with pytest.raises(TunebookError) as raised:
        task_scores(results([], **{"exact_match,strip": value}))
    assert raised.value.problem_id == "score-not-finite"
    score = task_scores(results([], **{"exact_match,strip": 1.0, "exact_match_stderr,strip": value}))
    assert score["words"]["stderr"] is None


def test_an_evaluation_is_finished_when_no_task_of_it_failed(tmp_path: Path) -> None:
    assert not is_evaluated(tmp_path, "before")
    (tmp_path / "evaluation").mkdir()
    file = tmp_path / "evaluation" / "before.json"
    for text, expected in (('{"failed": {}}', True), ('{"failed": {"a": "why"}}', False), ("{}", True)):
        file.write_text(text)
        assert is_evaluated(tmp_path, "before") is expected
