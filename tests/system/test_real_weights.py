"""A pretrained model learns to call tools on a CPU: real weights and real data, made from packages of the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

LEARNS_WITHIN_S = 3600  # 25 minutes of CPU time, of which two cores share most


@pytest.mark.slow
def test_a_pretrained_model_learns_to_call_tools(run: Any, project_root: Path, tmp_path: Path) -> None:
    inputs = project_root / ".cache" / "tests" / "inputs"
    script = project_root / "recipes" / "smollm2_135m_boolq" / "make_inputs.py"
    subprocess.run([sys.executable, str(script), str(inputs)], check=True, timeout=900)
    words = [
        "tunebook", "train", "smollm2_135m_tools", "model.name=null", f"model.path={inputs / 'smollm2_135m'}",
        "dataset=file", f"dataset.path={inputs / 'tool_calls' / 'train.jsonl'}", "dataset.validation_share=0",
        f"evaluation.tasks=[{inputs / 'tool_calls' / 'calls.yaml'}]", "evaluation.before=true", "evaluation.limit=12",
        "training.max_steps=24", "training.global_samples=8", "training.max_length=448", "hardware=cpu",
        "training.evaluate_every_steps=null", "optimizer.learning_rate=5e-4", f"outputs={tmp_path}",
    ]  # fmt: skip
    ended = run(words, timeout_s=LEARNS_WITHIN_S)
    assert ended.exit_code == 0, ended.output
    folder = (tmp_path / "smollm2_135m_tools" / "latest").resolve()
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 24
    assert fmean(losses[-6:]) < 0.7 * fmean(losses[:3])
    before, after = (json.loads((folder / "evaluation" / f"{when}.json").read_text()) for when in ("before", "after"))
    assert before["tasks"]["tool_calls"]["value"] == 0
    assert after["tasks"]["tool_calls"]["value"] > 0
