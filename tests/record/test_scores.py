from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.record.run_record import RunRecord
from tunebook.record.scores import (
    ScoreRow,
    answers_of,
    later_evaluations,
    pair_samples,
    score_rows,
    split_turns,
)

MINUS = "\N{MINUS SIGN}"


def evaluation(value: float, **more: Any) -> dict[str, Any]:
    groups = {"sort": {"value": value, "num_items": 5}}
    task = {"metric": "exact_match", "value": value, "stderr": 0.02, "num_items": 5, "groups": groups}
    return {"tasks": {"example": task}, "samples": []} | more


def texts(row: ScoreRow) -> list[str | None]:
    return [score and score.text for score in row.scores]


def changes(row: ScoreRow) -> list[str | None]:
    return [score and score.change for score in row.scores]


def sample(prompt: str, answer: str, correct: bool | None) -> dict[str, Any]:
    return {"task": "example", "group": "sort", "prompt": prompt, "answer": answer, "expected": "x", "correct": correct}


def test_rows_of_tasks_and_groups_have_scores_with_errors() -> None:
    task, group = score_rows(evaluation(0.0), evaluation(0.8))
    assert (task.name, task.is_group, task.metric) == ("example", False, "exact_match")
    assert texts(task) == ["0.0 % ± 2.0", "80.0 % ± 2.0"]
    assert changes(task) == ["", "+80.0 ± 2.8 points"]
    assert (group.name, group.is_group, group.num_items) == ("sort", True, "5")
    # sqrt(0.8 x 0.2 / (5 - 1)) = 0.2
    assert group.scores[1] is not None and group.scores[1].standard_error == pytest.approx(0.2)
    assert texts(group) == ["0.0 % ± 0.0", "80.0 % ± 20.0"]


def test_the_error_of_a_change_is_that_of_the_paired_items(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    records = []
    for when, values in (("before", (0, 0, 1, 1)), ("after", (0, 1, 1, 1))):
        answers = [
            {"task": "example", "group": "sort" if item < 3 else "count", "item": item, "value": value}
            for item, value in enumerate(values)
        ]
        lines = "".join(json.dumps(answer) + "\n" for answer in answers)
        (tmp_path / "evaluation" / f"{when}-answers.jsonl").write_text(lines)
        records.append(evaluation(sum(values) / 4, when=when))
        records[-1]["tasks"]["example"]["items_sha256"] = "same"
    pairs = [answers_of(tmp_path, record) for record in records]
    assert pairs[1] == {
        ("example", None): {0: 0, 1: 1, 2: 1, 3: 1},
        ("example", "sort"): {0: 0, 1: 1, 2: 1},
        ("example", "count"): {3: 1},
    }
    # 0 1 0 0: a standard deviation of 1/2, over sqrt(4)
    assert changes(score_rows(*records, *pairs)[0]) == ["", "+25.0 ± 25.0 points"]
    unpaired = ["", "+25.0 ± 2.8 points"]  # both errors of 0.02
    assert changes(score_rows(*records)[0]) == changes(score_rows(*records, {}, pairs[1])[0]) == unpaired
    assert changes(score_rows(*records, pairs[1], pairs[1])[0]) == unpaired  # the score is not their mean
    records[1]["tasks"]["example"]["items_sha256"] = "other"
    assert changes(score_rows(*records, *pairs)[0]) == unpaired


def test_answers_to_the_same_prompt_are_paired_and_five_are_shown() -> None:
    before = evaluation(0, samples=[sample(f"p{number}", "no", False) for number in range(1, 8)])
    after = evaluation(1, samples=[sample(f"p{number}", "yes", True) for number in range(7)])
    pairs = pair_samples(before, after)
    assert len(pairs) == 5
    assert pairs[0]["before"] is None
    assert (pairs[1]["before"], pairs[1]["after"]) == (("no", False), ("yes", True))
    assert pairs[1]["task"] == "example: sort"
    assert [pair["after"] for pair in pair_samples(before, {})] == [None] * 5


def test_known_templates_are_shown_as_turns() -> None:
    chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSort: b a<|im_end|>\n<|im_start|>assistant\n"
    assert split_turns(chatml) == [("system", "Be brief."), ("user", "Sort: b a")]
    llama = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert split_turns(llama) == [("user", "Hi")]
    for unknown in ("Question: 1 + 1?\nAnswer:", "before <|im_start|>user\nHi<|im_end|>\n", ""):
        assert split_turns(unknown) == [("", unknown)]


def judged_evaluation(when: str, values: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """The record of an evaluation whose items have these values."""
    tasks = {
        name: {
            "metric": "exact_match", "value": sum(items) / len(items), "stderr": 0.1, "num_items": len(items),
            "groups": {},
        }
        for name, items in values.items()
    }  # fmt: skip
    return {"when": when, "model": "model", "limit": None, "tasks": tasks, "failed": {}} | more


def test_later_evaluations_are_listed_the_newest_first(tmp_path: Path) -> None:
    later = [
        judged_evaluation("eval-1", {"words": [0, 0], "numbers": [0, 0]}),
        judged_evaluation("eval-2", {"numbers": [1, 1]}, limit=2),
        judged_evaluation("eval-3", {"numbers": [0, 1]}, model="checkpoints/checkpoint-20"),  # another model
    ]
    run = RunRecord(folder=tmp_path, after=judged_evaluation("after", {"words": [1, 1]}), evaluations=later)
    evaluations = later_evaluations(run)
    assert [entry[:2] for entry in evaluations] == [
        ("eval-3", "checkpoints/checkpoint-20"),
        ("eval-2", "model, the first 2 items"),
        ("eval-1", "model"),
    ]
    assert [(row.name, texts(row)) for row in evaluations[0][2]] == [("numbers", ["50.0 % ± 10.0"])]
