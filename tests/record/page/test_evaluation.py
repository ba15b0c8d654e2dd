from __future__ import annotations

from typing import Any

import pytest

from tunebook.record.page.evaluation import baseline_text, pair_samples, score_rows, split_turns


def evaluation(value: float, **more: Any) -> dict[str, Any]:
    groups = {"sort": {"value": value, "num_items": 5}}
    task = {"metric": "exact_match", "value": value, "stderr": 0.02, "num_items": 5, "groups": groups}
    return {"tasks": {"example": task}, "samples": [], "baseline": None} | more


def sample(prompt: str, answer: str, correct: bool | None) -> dict[str, Any]:
    return {"task": "example", "group": "sort", "prompt": prompt, "answer": answer, "expected": "x", "correct": correct}


def test_tasks_and_groups_stand_before_and_after_with_their_errors() -> None:
    task, group = score_rows(evaluation(0.0), evaluation(0.8))
    assert (task.name, task.is_group, task.metric, task.change) == (
        "example",
        False,
        "exact match",
        "+80.0 ± 2.8 points",
    )
    assert task.after is not None and task.after.text == "80.0 % ± 2.0"
    assert (group.name, group.is_group, group.num_items) == ("sort", True, 5)
    # sqrt(0.8 x 0.2 / (5 - 1)) = 0.2
    assert group.after is not None and group.after.standard_error == pytest.approx(0.2)
    assert group.after.text == "80.0 % ± 20.0"


def test_the_change_of_a_task_and_its_groups_is_paired_item_by_item() -> None:
    before, after = evaluation(0.2, stderr=0.2), evaluation(0.8, stderr=0.2)
    old, new = {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 0.0}
    keys = (("example", None), ("example", "sort"))
    task, group = score_rows(before, after, dict.fromkeys(keys, old), dict.fromkeys(keys, new))
    # 0 1 1 1 0: a standard deviation of sqrt(0.3), over sqrt(5)
    assert (task.change, group.change) == ("+60.0 ± 24.5 points", "+60.0 ± 24.5 points")


def test_one_evaluation_alone_has_no_change() -> None:
    (task, _) = score_rows(None, evaluation(0.8))
    assert (task.before, task.change) == (None, "")
    assert score_rows(None, None) == []


def test_a_metric_that_is_no_share_has_no_bar_and_no_percent() -> None:
    before, after = evaluation(31.5), evaluation(12.25)
    task, _ = score_rows(before, after)
    assert not task.has_bar
    assert task.after is not None and task.after.text == "12.2 ± 0.02"
    assert task.change == "\N{MINUS SIGN}19.2 ± 0.0283"  # sqrt(0.02 x 0.02 + 0.02 x 0.02)


def test_the_baseline_is_drawn_beside_a_single_task_and_its_groups() -> None:
    baseline = {"name": "look-up", "value": 0.25, "groups": {"sort": {"value": 0.4, "num_items": 5}}}
    after = evaluation(0.8, baseline=baseline)
    assert [row.baseline for row in score_rows(None, after)] == [0.25, 0.4]
    assert baseline_text(None, after) == "look-up: 25.0 %"
    after["tasks"]["other"] = after["tasks"]["example"]
    assert [row.baseline for row in score_rows(None, after)] == [None] * 4  # whose would it be?
    assert baseline_text(None, evaluation(0.8)) is None


def test_answers_to_the_same_prompt_are_paired_and_five_are_shown() -> None:
    before = evaluation(0, samples=[sample(f"p{number}", "no", False) for number in range(1, 8)])
    after = evaluation(1, samples=[sample(f"p{number}", "yes", True) for number in range(7)])
    pairs = pair_samples(before, after)
    assert len(pairs) == 5
    assert pairs[0].before is None
    assert pairs[1].before is not None and pairs[1].before.text == "no"
    assert pairs[1].after is not None and pairs[1].after.is_right
    assert pairs[1].task == "example: sort"
    assert [pair.after for pair in pair_samples(before, None)] == [None] * 5


def test_an_answer_without_a_verdict_is_neither_right_nor_wrong() -> None:
    (pair,) = pair_samples(None, evaluation(0.5, samples=[sample("p", "text", None)]))
    assert pair.after is not None and pair.after.is_right is None


def test_known_templates_are_shown_as_turns() -> None:
    chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSort: b a<|im_end|>\n<|im_start|>assistant\n"
    assert split_turns(chatml) == [("system", "Be brief."), ("user", "Sort: b a")]
    llama = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert split_turns(llama) == [("user", "Hi")]


@pytest.mark.parametrize("prompt", ["Question: 1 + 1?\nAnswer:", "before <|im_start|>user\nHi<|im_end|>\n", ""])
def test_a_prompt_that_a_template_does_not_explain_whole_is_shown_as_it_is(prompt: str) -> None:
    assert split_turns(prompt) == [("", prompt)]
