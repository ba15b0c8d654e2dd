"""Real evaluations of every kind of request, by a model whose every probability is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tunebook.config.frozen import load_config
from tunebook.evaluate import worker
from tunebook.evaluate.trained_model import load_trained, trained_architecture

TaskFile = Callable[[str], Path]
KnownRun = Callable[..., Path]


def record(run: Path, when: str = "before") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "evaluation" / f"{when}.json").read_text())
    return content


def answers(run: Path, when: str = "before") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation" / f"{when}-answers.jsonl").read_text().splitlines()]


def test_every_kind_of_request_is_scored_as_by_hand(evaluated: Path, known_folder: Path) -> None:
    # From the table in conftest.py. The most likely word after a word: a b c d </s>.
    by_hand = {
        "next_word": ("acc", 0.5),  # b after a, c after c a; but neither d after b nor a after d
        "choice": ("acc", 2 / 3),  # the third one's right answer has a quarter of the likeliest one's probability
        "continuation": ("exact_match", 0.75),  # after d it ends at once
        "whole_text": ("word_perplexity", 2.0),  # each of the 6 words has 1/2
    }
    content = record(evaluated)
    scores = {name: (task["metric"], pytest.approx(task["value"], rel=1e-5)) for name, task in content["tasks"].items()}
    assert scores == by_hand
    # 1 1 0 0: a standard deviation of sqrt(1/3), over sqrt(4)
    assert content["tasks"]["next_word"]["stderr"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert (content["model"], content["batch_size"]) == (f"{known_folder} (pretrained weights)", 3)
    assert (len(content["samples"]), len(answers(evaluated))) == (5, 13)
    by_item = {(answer["task"], answer["item"]): answer for answer in answers(evaluated)}
    assert by_item["continuation", 0]["responses"] == ["bcd"]
    assert by_item["choice", 2]["answer"] == "d"
    # ln 1/2 + ln 1/2 of the two words
    assert by_item["next_word", 1]["responses"] == pytest.approx([-1.386294], rel=1e-5)


@pytest.mark.usefixtures("quiet_harness")
def test_kept_answers_are_used_by_the_next_evaluation(
    evaluated: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(evaluated, tmp_path / "run")
    evaluation = run / "evaluation"
    next(evaluation.glob("parts/whole_text-*")).unlink()
    assert worker.main(["--run", str(run), "--when", "again"]) == 0
    assert "kept answers were used for next_word, choice, continuation; without" in capfd.readouterr().err
    assert record(run, "again")["reused"] == ["next_word", "choice", "continuation"]
    assert record(run, "again")["tasks"] == record(run)["tasks"]
    assert answers(run, "again") == answers(run)


@pytest.mark.usefixtures("quiet_harness")
def test_a_failed_task_does_not_stop_the_others(
    task_file: TaskFile, known_run: KnownRun, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = task_file("choice")
    broken.write_text(broken.read_text() + "process_results: !function scoring.score\n")
    scoring = broken.with_name("scoring.py")
    scoring.write_text("def score(doc, results):\n    raise ValueError('no score for this')\n")
    run = known_run([broken, task_file("continuation")])
    assert worker.main(["--run", str(run), "--when", "before"]) == 1
    assert "evaluation: 1 of 2 tasks failed: choice (ValueError: no score for this)" in capfd.readouterr().err
    assert (list(record(run)["tasks"]), list(record(run)["failed"])) == (["continuation"], ["choice"])
    scoring.write_text("def score(doc, results):\n    return {'acc': 1}\n")
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    assert record(run)["reused"] == ["choice", "continuation"]  # its answers were kept before they were scored
    assert (list(record(run)["tasks"]), record(run)["failed"]) == (["choice", "continuation"], {})


@pytest.mark.usefixtures("quiet_harness")
def test_a_task_without_data_is_refused_before_a_model_is_loaded(
    task_file: TaskFile, known_run: KnownRun, capfd: pytest.CaptureFixture[str]
) -> None:
    file = task_file("next_word")
    (file.parent / "next_word.jsonl").unlink()
    run = known_run([file, task_file("choice")])
    assert worker.main(["--run", str(run), "--when", "before"]) == 2
    assert list((run / "evaluation").iterdir()) == []
    assert "evaluation: the data of task" in capfd.readouterr().err


def test_a_model_over_several_devices_answers_as_on_one(
    known_run: KnownRun, relative_difference: Callable[[torch.Tensor, torch.Tensor], float]
) -> None:
    config = load_config(known_run([]) / "run.yaml")
    whole: Any = load_trained(config, None)
    sharded: Any = load_trained(config, None, is_sharded=True)
    tokens = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        difference = relative_difference(sharded(tokens).logits, whole(tokens).logits)
    assert difference < 32 * torch.finfo(torch.float32).eps  # sums in another order
    assert trained_architecture(config, None).max_position_embeddings == 64
