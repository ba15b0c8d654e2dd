"""What is measured for a configuration, by what it is kept, and what is read from the two steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunebook.config.choices import Generation, LauncherName, PackingMode, PeftMethod, Strategy, TrackerName
from tunebook.config.frozen import plain_config
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import (
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ParallelismConfig,
    PeftSettings,
    RunConfig,
    TrainingConfig,
)
from tunebook.data.batch import solve_batch
from tunebook.hardware.detect import Gpu, Machine
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
LINES = [
    {"memory_gib": [50.0, 61.5], "memory_reserved_gib": [55.0, 66.0], "memory_device_gib": [57.0, 68.0],
     "tokens_per_second_per_gpu": 90.0},
    {"memory_gib": [62.0, 61.5], "memory_reserved_gib": [70.0, 66.0], "memory_device_gib": [72.0, 68.0],
     "tokens_per_second_per_gpu": 12_000.0},
]  # fmt: skip


def run_of(packing: PackingConfig | None = None, **training: Any) -> RunConfig:
    """A configuration for two H100s; `training` replaces its settings."""
    settings = {"max_length": 2048, "global_samples": 528, "micro_batch_size": 2} | training
    return plain_config(
        model=ModelConfig(name="org/model"),
        dataset=DatasetConfig(path="x.jsonl", num_documents=10_000),
        hardware=HardwareConfig(generation=Generation.hopper, gpus_per_node=2),
        parallelism=ParallelismConfig(strategy=Strategy.zero2),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        packing=packing or PackingConfig(mode=PackingMode.padded),
        training=TrainingConfig(**settings),
    )


def key(config: RunConfig, machine: Machine = TWO_H100) -> Path:
    return measurement_file(config, solve_batch(config, None), machine)


def test_the_highest_peak_of_each_rank_and_the_speed_of_the_last_step_are_read():
    found = read_steps(LINES, 4096, "2026-01-02")
    assert (found.memory_gib, found.memory_reserved_gib, found.memory_device_gib) == ([62, 61.5], [70, 66], [72, 68])
    assert (found.tokens_per_second_per_gpu, found.ran_out) == (12_000.0, None)
    on_cpu = read_steps([{"memory_gib": [0.6], "tokens_per_second_per_gpu": 9.0}] * 2, 64, "2026-01-02")
    assert (on_cpu.memory_gib, on_cpu.memory_reserved_gib) == ([0.6], [])


def test_a_measurement_is_of_what_changes_memory(monkeypatch):
    usual, config = run_of(), run_of(seed=7, max_steps=50, global_samples=1056)
    config.optimizer.learning_rate, config.tracking.name = 3e-3, TrackerName.tensorboard
    assert key(config) == key(usual)
    changed = [run_of(max_length=512), run_of(micro_batch_size=1)]
    changed += [replace(usual, parallelism=ParallelismConfig(strategy=Strategy.ddp))]
    changed += [replace(usual, peft=PeftSettings(method=PeftMethod.lora))]
    larger = replace(H100, memory_gib=139.8)
    files = [*map(key, changed), key(usual, replace(TWO_H100, gpus=[larger, larger]))]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    files.append(key(usual))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert len({key(usual), *files}) == 1 + len(files)


@pytest.mark.parametrize(
    ("packing", "training", "passes"),
    [
        (None, {"global_samples": 4}, 1),
        (None, {}, 2),  # of 528 documents, as good as 132
        (PackingConfig(mode=PackingMode.isolated, row_length=2048), {"micro_batch_size": 1}, 2),
        # no multiple of a document's 2,048 tokens
        (PackingConfig(mode=PackingMode.isolated, row_length=3000), {"micro_batch_size": 1}, 2),
        (PackingConfig(mode=PackingMode.isolated, row_length=4096),
         {"global_tokens": 16_384, "global_samples": None}, 1),
    ],
)  # fmt: skip
def test_every_row_is_full_and_a_step_takes_two_passes_where_the_run_takes_several(packing, training, passes):
    config = run_of(packing, **training)
    batch = solve_batch(config, None)
    measured = measured_config(config, batch)
    documents = measured.dataset.synthetic
    assert documents.min_tokens == documents.max_tokens <= 2048
    solved = solve_batch(measured, np.full(documents.num_documents, documents.max_tokens))
    assert (solved.accumulation, solved.total_steps, solved.micro_batch_size) == (passes, 2, batch.micro_batch_size)
    assert batch.row_length - 2 < solved.longest_row <= batch.row_length


def test_a_measurement_is_found_again_and_a_damaged_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    config = run_of()
    batch = solve_batch(config, None)
    assert recall_measurement(config, batch, TWO_H100) is None
    taken = read_steps(LINES, 4096, "2026-01-02")
    keep_measurement(taken, config, batch, TWO_H100)
    assert recall_measurement(config, batch, TWO_H100) == taken
    assert recall_measurement(config, None, TWO_H100) is None
    for content in ("{", "{}", "[]"):
        measurement_file(config, batch, TWO_H100).write_text(content)
        assert recall_measurement(config, batch, TWO_H100) is None


def test_ranks_that_start_elsewhere_have_no_measurement():
    for config in (
        replace(run_of(), launcher=SlurmConfig(name=LauncherName.slurm)),
        replace(run_of(), hardware=HardwareConfig(generation=Generation.hopper, gpus_per_node=1, num_nodes=2)),
    ):
        assert not is_measurable(config)
        assert recall_measurement(config, solve_batch(config, None), TWO_H100) is None
