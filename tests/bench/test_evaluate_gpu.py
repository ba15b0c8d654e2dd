"""The evaluation's speed, measured on a CPU with a model of a few thousand weights."""

from __future__ import annotations

import json

import pytest

from ..evaluate.conftest import known_model, known_tokenizer, task_file  # noqa: F401
from . import evaluate_gpu


@pytest.fixture
def folder(tmp_path, known_model, known_tokenizer):  # noqa: F811
    known_model.save_pretrained(tmp_path / "model")
    known_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_choice_and_a_generation_are_evaluated(folder, task_file, tmp_path, capsys):  # noqa: F811
    """By a file that names one task of each, which is one process."""
    for name in ("choice", "continuation"):
        task_file(name)
    task, output = tmp_path / "tasks" / "some.yaml", tmp_path / "lines.jsonl"
    metrics = "aggregate_metric_list: [{metric: acc, aggregation: mean}]"
    task.write_text(f"group: some\ntask: [choice, continuation]\n{metrics}\nmetadata: {{version: 1.0}}\n")
    words = [str(folder), str(task), "--batch-size", "2", "--limit", "2", "--output", str(output)]
    assert evaluate_gpu.main(words) == 0
    printed = capsys.readouterr().out
    assert printed == output.read_text()
    line = json.loads(printed)
    assert (line["items"], line["chosen_batch_size"], line["device"], line["gpu"], line["peak_gib"]) == (
        4, 2, "cpu", None, None
    )  # fmt: skip
    assert {name: list(score) for name, score in line["scores"].items()} == {
        "choice": ["acc"], "continuation": ["exact_match"]
    }  # fmt: skip
    assert line["items_per_s"] > 0 and line["total_s"] > line["seconds"]


def test_every_batch_size_is_tried_although_one_fails(folder, task_file, monkeypatch, capsys):  # noqa: F811
    def measure(folder, words, environment, timeout_s):
        size = json.loads(words[words.index("--evaluation") + 1])["batch_size"]
        return {"error": "no memory"} if size == 8 else {"items": 1}

    monkeypatch.setattr(evaluate_gpu, "measure", measure)
    assert evaluate_gpu.main([str(folder), str(task_file("choice")), "--batch-size", "8", "auto"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["batch_size"], line.get("error")) for line in lines] == [("8", "no memory"), ("auto", None)]


def test_what_takes_too_long_is_ended_and_what_is_wrong_is_refused(folder, task_file, tmp_path, capsys):  # noqa: F811
    task = str(task_file("choice"))
    assert evaluate_gpu.main([str(folder), task, "--batch-size", "1", "--timeout-s", "0.2"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "not ended after 0.2 s"
    assert evaluate_gpu.main([str(tmp_path), task]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    for words, code in ((["--batch-size", "0"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            evaluate_gpu.main([str(folder), task, *words])
        assert ended.value.code == code
    assert "items per task" in capsys.readouterr().out
