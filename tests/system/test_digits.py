"""A model for images and text learns from scratch on a CPU to read digits, also in numbers that it was not shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

LEARNS_WITHIN_S = 3600  # 3 minutes of CPU time


@pytest.mark.slow
def test_it_reads_numbers_that_it_was_not_shown(run: Any, project_root: Path, tmp_path: Path) -> None:
    recipe = project_root / "recipes" / "digits"
    drawn = run([sys.executable, str(recipe / "make_inputs.py"), str(tmp_path)], timeout_s=600)
    assert drawn.exit_code == 0, drawn.output
    task = {"include": str(recipe / "tasks" / "digits.yaml"), "metadata": {"conversations": "heldout.jsonl"}}
    (tmp_path / "digits.yaml").write_text(json.dumps(task))
    words = [f"dataset.path={tmp_path / 'train.jsonl'}", f"evaluation.tasks=[{tmp_path / 'digits.yaml'}]"]
    ended = run(["tunebook", "train", "digits", *words, f"outputs={tmp_path}"], timeout_s=LEARNS_WITHIN_S)
    assert ended.exit_code == 0, ended.output
    folder = (tmp_path / "digits" / "latest").resolve()
    before, after = (json.loads((folder / "evaluation" / f"{when}.json").read_text()) for when in ("before", "after"))
    assert before["tasks"]["digits"]["value"] <= 0.05
    assert after["tasks"]["digits"]["value"] >= 0.85
    image = str(tmp_path / "images" / "heldout" / "00000.png")
    chatted = run(["tunebook", "chat", str(folder), "--image", image, "Which colors are there?"])
    assert chatted.exit_code == 0
