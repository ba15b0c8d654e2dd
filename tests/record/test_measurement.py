"""What is measured for a configuration, by what it is kept, and what is read from the two steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tunebook.config.choices import Generation
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.draft import draft_run
from tunebook.record import measurement as module
from tunebook.record.measurement import (
    is_measurable,
    keep_measurement,
    measured_config,
    measurement_file,
    read_steps,
    recall_measurement,
)

H100 = Gpu(name="NVIDIA H100", memory_gib=79.6, compute_capability=(9, 0), generation=Generation.hopper)
TWO_H100 = Machine(gpus=[H100, H100], driver="580", num_cpus=8, host_memory_gib=200.0)
RECIPE, USUAL = "qwen3b_zero2", ("hardware=hopper", "hardware.gpus_per_node=2", "training.micro_batch_size=2")
LINES = [
    {"memory_gib": [50.0, 61.5], "memory_reserved_gib": [55.0, 66.0], "memory_device_gib": [57.0, 68.0],
     "tokens_per_second_per_gpu": 90.0},
    {"memory_gib": [62.0, 61.5], "memory_reserved_gib": [70.0, 66.0], "memory_device_gib": [72.0, 68.0],
     "tokens_per_second_per_gpu": 12_000.0},
]  # fmt: skip


def planned(*words: str):
    """The resolved configuration and its batch, on two H100s."""
    draft = draft_run(RECIPE, [*USUAL, *words], [], TWO_H100)
    draft.raise_errors()
    return draft.resolution.config, draft.batch


def key(*words: str, machine: Machine = TWO_H100) -> Path:
    return measurement_file(*planned(*words), machine)


def test_the_highest_peak_of_each_rank_and_the_speed_of_the_last_step_are_read():
    found = read_steps(LINES, 4096, "2026-01-02")
    assert (found.memory_gib, found.memory_reserved_gib, found.memory_device_gib) == ([62, 61.5], [70, 66], [72, 68])
    assert (found.tokens_per_second_per_gpu, found.ran_out) == (12_000.0, None)
    on_cpu = read_steps([{"memory_gib": [0.6], "tokens_per_second_per_gpu": 9.0}] * 2, 64, "2026-01-02")
    assert (on_cpu.memory_gib, on_cpu.memory_reserved_gib) == ([0.6], [])


@pytest.mark.parametrize(
    "words",
    [
        "training.seed=7",
        "optimizer.learning_rate=3e-3",
        "training.max_steps=50",
        "training.global_samples=1056",
        "tracking=tensorboard",
        "hardware.host_memory_gib=500",
    ],
)
def test_what_changes_no_memory_finds_the_same_measurement(words):
    assert key(words) == key()


@pytest.mark.parametrize(
    "words",
    [
        "training.max_length=512",
        "training.micro_batch_size=1",
        "parallelism=fsdp",
        "peft=lora",
        "hardware.gpus_per_node=1 parallelism=single",
    ],
)
def test_what_changes_memory_does_not(words):
    assert key(*words.split()) != key()


def test_neither_does_another_gpu_package_or_setting_of_the_allocator(monkeypatch):
    usual, larger = key(), replace(H100, memory_gib=139.8)
    assert key(machine=replace(TWO_H100, gpus=[larger, larger])) != usual
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
        assert key() != usual
    monkeypatch.setattr(module, "PACKAGES", ("torch",))
    assert key() != usual


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("training.global_samples=4 packing=padded", 1),
        ("training.global_samples=528 packing=padded", 2),  # as good as 132
        ("packing=isolated packing.row_length=2048", 2),
        ("packing=isolated packing.row_length=3000", 2),  # no multiple of a document's 2,048 tokens
        ("training.global_tokens=16384 training.global_samples=null packing.row_length=4096 packing=isolated", 1),
    ],
)
def test_every_row_is_full_and_a_step_takes_two_passes_where_the_run_takes_several(words, passes):
    config, batch = planned("training.max_length=2048", *words.split())
    measured = measured_config(config, batch)
    documents = measured.dataset.synthetic
    assert documents.min_tokens == documents.max_tokens <= 2048
    solved = solve_batch(measured, np.full(documents.num_documents, documents.max_tokens))
    assert (solved.accumulation, solved.total_steps, solved.micro_batch_size) == (passes, 2, batch.micro_batch_size)
    assert batch.row_length - 2 < solved.longest_row <= batch.row_length


def test_a_measurement_is_found_again_and_a_damaged_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    config, batch = planned()
    assert recall_measurement(config, batch, TWO_H100) is None
    taken = read_steps(LINES, 4096, "2026-01-02")
    keep_measurement(taken, config, batch, TWO_H100)
    assert recall_measurement(config, batch, TWO_H100) == taken
    assert recall_measurement(config, None, TWO_H100) is None
    for content in ("{", "{}", "[]"):
        measurement_file(config, batch, TWO_H100).write_text(content)
        assert recall_measurement(config, batch, TWO_H100) is None


@pytest.mark.parametrize("words", ["launcher=slurm", "launcher=ray", "hardware.num_nodes=2"])
def test_ranks_that_start_elsewhere_have_no_measurement(words):
    config, batch = planned(words)
    assert isinstance(batch, BatchPlan)
    assert not is_measurable(config)
    assert recall_measurement(config, batch, TWO_H100) is None
