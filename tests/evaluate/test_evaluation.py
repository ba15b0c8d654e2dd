"""Where the model of an evaluation is put; what comes of one is tried in test_kept_answers.py and test_worker.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tunebook.config.frozen import load_config
from tunebook.evaluate import placement, worker
from tunebook.evaluate.evaluation import score_baseline
from tunebook.evaluate.trained_model import load_trained, trained_architecture
from tunebook.hardware.detect import VISIBLE_VARIABLE

TaskFile = Callable[[str], Path]
KnownRun = Callable[..., Path]


def test_a_model_over_several_devices_answers_as_on_one(
    known_run: KnownRun,
    monkeypatch: pytest.MonkeyPatch,
    relative_difference: Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    config = load_config(known_run([]) / "run.yaml")
    asked: list[Any] = []
    original = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("device_map"))
        return original(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    whole: Any = load_trained(config, None)
    sharded: Any = load_trained(config, None, is_sharded=True)
    assert asked == [None, "auto"]
    tokens = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        difference = relative_difference(sharded(tokens).logits, whole(tokens).logits)
    assert difference < 32 * torch.finfo(torch.float32).eps  # sums in another order
    assert trained_architecture(config, None).max_position_embeddings == 64


@pytest.mark.usefixtures("quiet_harness")
def test_a_run_made_for_a_cpu_leaves_the_gpus_alone(
    task_file: TaskFile, known_run: KnownRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "detect_machine", lambda: pytest.fail("it was asked for GPUs"))
    monkeypatch.setenv(VISIBLE_VARIABLE, "0,1")
    run = known_run([task_file("choice")])
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    record = json.loads((run / "evaluation" / "before.json").read_text())
    assert record["spread"] == {"text": "on the CPU, 1 process", "processes": 1, "is_sharded": False}
    assert record["device"] == "cpu"


def test_the_function_is_given_both_files_and_its_shares_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "baseline.py"
    file.write_text(
        "NAME = 'guess'\n"
        "def score(train, heldout):\n"
        "    assert (train.name, heldout.name) == ('train.jsonl', 'heldout.jsonl')\n"
        "    return {'overall': 0.5, 'b': 1, 'a': 0}\n"
    )
    assert score_baseline(file, Path("train.jsonl"), Path("heldout.jsonl")) == {
        "name": "guess",
        "value": 0.5,
        "groups": {"a": {"value": 0.0}, "b": {"value": 1.0}},
    }
