"""Run folders as trials leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.sweep.results import TrialResult, read_result
from tunebook.sweep.trial_process import TrialEnd
from tunebook.sweep.trials import Trial

MakeResult = Callable[..., TrialResult]


@pytest.fixture
def make_result(tmp_path: Path) -> MakeResult:
    """Write what one trial left and read it back; leave out what it did not come to."""

    def make(
        number: int,
        *,
        exit_code: int | None = 0,
        losses: tuple[float | None, ...] = (),
        speeds: tuple[float | None, ...] = (),
        validation_loss: float | None = None,
        score: float | None = None,
        is_higher_better: bool = True,
        state: str = "finished",
        reason: str | None = None,
        was_interrupted: bool = False,
        pruned: str | None = None,
        killed: str | None = None,
        recorded_exit_code: int | None = None,
        best_step: int | None = None,
    ) -> TrialResult:
        overrides = ("optimizer=adamw", f"training.seed={number}")
        trial = Trial(number=number, overrides=overrides, swept={"training.seed": str(number)})
        folder = tmp_path / trial.name
        folder.mkdir()
        steps = [
            {"step": step, "loss": loss, "tokens_per_second_per_gpu": speed}
            for step, (loss, speed) in enumerate(zip(losses, speeds or [None] * len(losses), strict=True), 1)
        ]
        if validation_loss is not None:
            steps += [{"step": 1, "validation_loss": 9.0}, {"step": len(losses), "validation_loss": validation_loss}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
        recorded = exit_code if recorded_exit_code is None else recorded_exit_code
        status = {"state": state, "exit_code": recorded, "reason": reason, "best_step": best_step}
        (folder / "manifest.json").write_text(json.dumps({"format": 1, "status": status}))
        if score is not None:
            task = {"value": score, "higher_is_better": is_higher_better, "subtasks": []}
            (folder / "evaluation").mkdir()
            (folder / "evaluation" / "after.json").write_text(json.dumps({"tasks": {"words": task}}))
        end = None
        if exit_code is not None:
            end = TrialEnd(
                exit_code=exit_code,
                seconds=1.5,
                was_interrupted=was_interrupted,
                was_pruned=pruned is not None,
                reason=pruned or killed,
            )
        return read_result(trial, folder, end)

    return make
