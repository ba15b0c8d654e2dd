"""Real evaluations of every kind of request, by a model whose every probability is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.frozen import load_config
from tunebook.evaluate import worker
from tunebook.evaluate.trained_model import trained_architecture

TaskFile = Callable[[str], Path]
KnownRun = Callable[..., Path]


def record(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "evaluation" / "before.json").read_text())
    return content


@pytest.mark.usefixtures("quiet_harness")
def test_every_kind_of_request_is_scored_as_by_hand(
    task_file: TaskFile, known_run: KnownRun, known_folder: Path
) -> None:
    # From the table in conftest.py. The most likely word after a word: a b c d </s>.
    by_hand = {
        "next_word": ("acc", 0.5),  # b after a, c after c a; but neither d after b nor a after d
        "choice": ("acc", 2 / 3),  # the third one's right answer has a quarter of the likeliest one's probability
        "continuation": ("exact_match", 0.75),  # after d it ends at once
        "whole_text": ("word_perplexity", 2.0),  # each of the 6 words has 1/2
    }
    run = known_run([task_file(kind) for kind in by_hand], batch_size=3)
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    content = record(run)
    scores = {name: (task["metric"], pytest.approx(task["value"], rel=1e-5)) for name, task in content["tasks"].items()}
    assert scores == by_hand
    # 1 1 0 0: a standard deviation of sqrt(1/3), over sqrt(4)
    assert content["tasks"]["next_word"]["stderr"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert (content["model"], content["batch_size"]) == (f"{known_folder} (pretrained weights)", 3)
    answers = [json.loads(line) for line in (run / "evaluation" / "before-answers.jsonl").read_text().splitlines()]
    assert (len(content["samples"]), len(answers)) == (5, 13)
    by_item = {(answer["task"], answer["item"]): answer for answer in answers}
    assert by_item["continuation", 0]["responses"] == ["bcd"]
    assert by_item["choice", 2]["answer"] == "d"
    # ln 1/2 + ln 1/2 of the two words
    assert by_item["next_word", 1]["responses"] == pytest.approx([-1.386294], rel=1e-5)


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
    assert "dataset_kwargs.data_files: no file" in capfd.readouterr().err


def test_the_context_of_the_model_is_known_before_it_is_loaded(known_run: KnownRun) -> None:
    assert trained_architecture(load_config(known_run([]) / "run.yaml"), None).max_position_embeddings == 64
