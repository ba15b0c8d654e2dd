"""What the lines of gpu_checkpoints say of runs that went on, were stopped, or failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import gpu_checkpoints
from gpu_checkpoints import STEPS, Ended, compared, costs, last_step


def ended(losses: dict[int, float], exit_code: int | str = 0, **settings: Any) -> Ended:
    said = {"wall_s": 20.0, "first_step_after_s": 11.0, "last_words": ""} | settings
    return Ended(folder=Path("run"), exit_code=exit_code, losses=losses, **said)


@pytest.fixture
def whole() -> Ended:
    return ended({step: 8.0 - step / 4 for step in range(1, STEPS + 1)})


def test_only_what_came_after_the_stop_is_compared(whole: Ended) -> None:
    stopped = {step: loss for step, loss in whole.losses.items() if step <= 7}
    resumed = whole.losses | {3: 100.0, 9: whole.losses[9] * 1.01}  # the third step is before the stop
    again = whole.losses | {2: whole.losses[2] * 1.001}
    line = compared(whole, ended(again), ended(stopped, 6), ended(resumed), None)
    assert line["stopped_after"] == 7
    assert line["resumed_difference"] == {"largest": pytest.approx(0.01), "at_step": 9, "same_bits": False}
    assert line["again_difference"] == {"largest": pytest.approx(0.001), "at_step": 2, "same_bits": False}
    assert line["exit_codes"] == {"whole": 0, "again": 0, "stopped": 6, "resumed": 0}
    assert "said" not in line


def test_on_fewer_gpus_the_second_half_is_compared(whole: Ended) -> None:
    half = {step: loss for step, loss in whole.losses.items() if step > 6}
    line = compared(whole, whole, whole, whole, ended(half))
    assert line["fewer_gpus_difference"] == {"largest": 0.0, "at_step": 7, "same_bits": True}


def test_a_run_that_failed_is_told_and_not_compared(whole: Ended) -> None:
    failed = ended({}, 2, last_words="error: it holds the shards of 2 ranks")
    line = compared(whole, whole, whole, ended(dict.fromkeys(range(1, 9), 1.0), "timeout"), failed)
    assert line["fewer_gpus_difference"] is line["resumed_difference"] is None
    assert line["said"] == {"fewer": "error: it holds the shards of 2 ranks"}


def test_costs_are_those_of_the_records(whole: Ended) -> None:
    whole.records = [{"step": 6, "seconds": 1.5, "files": {"a": {"size": 10}, "b": {"size": 5}}}]
    found = costs(whole, ended(whole.losses, first_step_after_s=14.0), {"seconds_per_step": 0.2})
    assert (found["save_s"], found["checkpoint_bytes"], found["seconds_per_step"]) == ([1.5], [15], 0.2)
    assert found["first_step_after_s"] == {"whole": 11.0, "resumed": 14.0}


def test_steps_are_read_while_they_are_written(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 2, "validation_loss": 3.0}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert last_step(tmp_path) == 2


def test_the_model_is_a_slice_of_whole_layers() -> None:
    words, described = gpu_checkpoints.shared_words(is_cpu=False, layers=8)
    assert f"model.facts.num_parameters={described['num_parameters']}" in words
    assert set(gpu_checkpoints.ON_FEWER) <= set(gpu_checkpoints.CASES)
