"""The memory plan against every run on H200s whose peak was recorded."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from memory_table import (
    RESULTS,
    Measured,
    as_it_was_run,
    held_out_lines,
    planned_again,
    read_architectures,
    read_held_out,
    read_measured,
    read_quantized,
)

from tunebook.plan.memory import USABLE_SHARE


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    """All runs as they are planned today, which takes half a minute."""
    return read_measured()


def test_each_run_is_planned_as_it_was_run() -> None:
    """What `auto` would do today is no measure of what was done then."""
    runs = {line["name"]: as_it_was_run(line) for line in map(json.loads, RESULTS.read_text().splitlines())}
    assert "model.compile_layers=false" in runs["8b_6_layers_lora_varlen"]
    assert "model.compile_layers=false" not in runs["8b_6_layers_lora_compiled"]
    assert "model.liger_kernel=true" in runs["qwen3b_zero2_2-1"]
    assert "model.liger_kernel=true" not in runs["qwen05b_single_1-1"]
    for words in runs.values():
        keys = [word.partition("=")[0] for word in words]
        assert keys.count("model.compile_layers") == 1 and keys.count("attention") >= 1
        assert "model.liger_kernel=true" not in words or "model.compile_layers=true" not in words


def test_the_plan_is_within_its_bounds_of_every_peak(measured: list[Measured]) -> None:
    runs = {run.name: run for run in measured}
    assert len(runs) >= 24
    assert statistics.median(abs(run.error) for run in runs.values()) <= 0.05
    wrong = {name: f"{run.error:+.1%}" for name, run in runs.items() if not -0.05 <= run.error <= 0.10}
    assert not wrong


@pytest.mark.filterwarnings("ignore")
def test_qlora_is_planned_within_the_same_bounds(tmp_path: Path) -> None:
    runs = read_quantized(tmp_path)
    assert len(runs) >= 8
    assert not {run.name: f"{run.error:+.1%}" for run in runs if not -0.05 <= run.error <= 0.10}


def test_runs_of_the_books_models_that_chance_drew_are_planned_within_the_same_bounds(tmp_path: Path) -> None:
    lines = held_out_lines()
    drawn = [line for line in lines if line["series"].startswith("drawn")]
    assert len(drawn) >= 110
    assert all(max(line["memory_gib"]) > 0 and "planned_then_gib" in line for line in drawn)
    runs = read_held_out(tmp_path, of_the_book=True)
    assert len(runs) == sum("sizes" not in line for line in lines) >= 15
    assert statistics.median(abs(run.error) for run in runs) <= 0.05
    assert not {run.name: f"{run.error:+.1%}" for run in runs if not -0.05 <= run.error <= 0.10}


@pytest.mark.parametrize(
    ("file", "name", "error"),
    [
        ("h200x2_sequence", "single_tiled", 0.005),  # as the next one, without offloading
        ("h200x2_sequence", "single_tiled_offload", 0.005),  # planned 12.4% too high with the inputs of six layers
        ("h200x2_book_held_out", "book_37_10", 0.05),  # 17% too high with gradient buckets while the head is computed
        ("h200x2_book_held_out", "book_37_5", 0.01),  # 11.6% too high with the head's reduced gradient, which is away
        ("h200x2_book_held_out", "book_38_29", 0.03),  # 12.7% too high with a gradient of experts that comes later
    ],
)
def test_what_offloading_leaves_on_the_gpu_is_counted_once(tmp_path: Path, file: str, name: str, error: float) -> None:
    lines = map(json.loads, (RESULTS.parent / f"{file}.jsonl").read_text(encoding="utf-8").splitlines())
    (run,) = [planned_again(line, tmp_path) for line in lines if line["name"] == name and "memory_gib" in line]
    assert abs(run.error) <= error


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of architectures, about sizes and positions
def test_every_recorded_peak_is_planned_within_the_gate(tmp_path: Path, measured: list[Measured]) -> None:
    """The median within 2%, 95% within 10%, the worst within 15%."""
    runs = [*measured, *read_quantized(tmp_path), *read_held_out(tmp_path), *read_architectures(tmp_path)]
    assert len(runs) >= 535
    errors = sorted(abs(run.error) for run in runs)
    assert statistics.median(errors) <= 0.02
    assert errors[int(0.95 * len(errors))] <= 0.10
    assert errors[-1] <= 0.15


def test_runs_that_the_plan_had_fill_a_gpu_did_not_run_out_of_memory() -> None:
    """Drawn to take as many rows in a pass as the plan allowed, many of documents of many lengths, on one H100 or two.

    Two did with segments that do not grow, as ranks no longer have them: an eighth of their memory was in pieces.
    """
    runs = [line for line in held_out_lines() if line["series"] == "edge"]
    assert [sum(run["gpus"] == number for run in runs) for number in (1, 2)] == [20, 14]
    once_out = [run for run in runs if "without_them" in run]
    assert len(once_out) == 2
    assert all(run["allocator"] == "expandable segments" for run in runs if run["gpus"] == 2 or run in once_out)
    assert all(run["without_them"]["reserved_not_allocated_gib"] > 79.6 / 8 for run in once_out)
    memory_gib = 79.6
    for run in runs:
        assert f"hardware.memory_gib={memory_gib}" in run["overrides"]
        assert 0.93 * USABLE_SHARE * memory_gib < run["planned_then_gib"] <= USABLE_SHARE * memory_gib
        assert max(run["memory_gib"]) <= max(run["memory_device_gib"]) < memory_gib
        assert run["steps"] in (3, 6) or "ended" in run, "else its time on the GPU was up"


def test_the_allocator_never_held_more_than_the_plan_leaves(measured: list[Measured]) -> None:
    """What decides is reserved memory: a quarter more than the plan has tensors take, but in these runs.

    It is more where the optimizer and the parameters are on the host, of little memory, and by up to 6% in two other
    runs. In compiled blocks with rows of many lengths it is more, too: the allocator gives back what it caches only
    when it needs it, so up to 18% where the card was nearly full, and whatever it likes where a quarter was to spare.
    """
    over = {run.name: run for run in measured if run.reserved > run.predicted / 0.8}
    of_many_lengths = {name for name in over if "_speed_" in name or name.startswith("claim_")}
    others = {"held_8b_3_layers_zero1_2", "held_3b_18_layers_zero2_offload_2"}
    assert (
        set(over)
        <= {"3b_zero3_offload_2", "3b_zero2_offload_2", "3b_fsdp_offload_2", "held_7b_4_layers_zero3_offload_2"}
        | of_many_lengths
        | others
    )
    assert all(over[name].reserved < 1.06 * over[name].predicted / 0.8 for name in others)
    full = {name for name in of_many_lengths if over[name].reserved >= 0.75 * 139.8}
    assert full and all(over[name].reserved < 1.18 * over[name].predicted / 0.8 for name in full)
