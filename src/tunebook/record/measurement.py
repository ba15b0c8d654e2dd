"""What two optimizer steps of a configuration took on this machine, kept in the cache for later plans and runs.

`tunebook plan --measure` trains the two steps (`launch.measure`); `plan.memory.verdict` judges by the result.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tunebook.config.choices import LauncherName, ScheduleName, Source
from tunebook.config.identity import comparable_config
from tunebook.config.schema import (
    DatasetConfig,
    EvaluationConfig,
    RunConfig,
    ScheduleConfig,
    SyntheticConfig,
    TrackingConfig,
    world_size,
)
from tunebook.data.batch import BatchPlan, shortest_row
from tunebook.facts.methods import method_facts
from tunebook.files import cache_root, remember, sha256_text
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.record.locks import PACKAGES

NUM_STEPS = 2  # the first step creates the optimizer's state, so only the second holds everything at once
_MOST_PASSES = 2  # the second pass of a step holds the first one's gradients; further passes add nothing
_LEARNING_RATE = 1e-6  # any that is small: the weights are thrown away
_ALLOCATOR = "PYTORCH_"  # environment variables that change how much memory the allocator takes


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What two steps took. The memory is in GiB by rank, as `metrics.jsonl` has it; empty after running out."""

    date: str  # YYYY-MM-DD, UTC
    row_length: int  # tokens of every row of the two steps
    memory_gib: list[float] = field(default_factory=list)  # peak of tensors; on a CPU the peak of the process
    memory_reserved_gib: list[float] = field(default_factory=list)  # peak that the allocator held; empty on a CPU
    memory_device_gib: list[float] = field(default_factory=list)  # of the GPU after the second step; empty on a CPU
    tokens_per_second_per_gpu: float | None = None  # of the second step
    ran_out: str | None = None  # why the steps ended early: memory ran out, and what filled it


def measured_config(config: RunConfig, batch: BatchPlan) -> RunConfig:
    """The run that is measured for a resolved configuration: two full steps, and nothing else.

    Every setting that changes no memory has a fixed value, so configurations that differ only in those share a
    measurement. Rows hold as many tokens as rows can. Documents fill a row evenly, and none is cut. 50 to 90% of the
    tokens of a generated document are trained on; one that is trained on whole takes slightly more for the output head.
    """
    passes = _MOST_PASSES if batch.accumulation is None else min(_MOST_PASSES, batch.accumulation)
    per_row = -(-batch.row_length // shortest_row(config)) if batch.is_packed else 1
    sides = per_row * method_facts(config).rows_per_document if batch.is_packed else 1
    document = batch.row_length // sides
    samples = batch.data_ranks * batch.micro_batch_size * passes * per_row
    synthetic = SyntheticConfig(
        num_documents=NUM_STEPS * samples,
        min_tokens=document,
        max_tokens=document,
        pairs=method_facts(config).reads == "pairs",
    )
    training = replace(  # a setting that is not named here is taken over: it may need memory
        config.training,
        global_samples=samples,
        global_tokens=None,
        micro_batch_size=batch.micro_batch_size,
        num_epochs=1.0,
        max_steps=NUM_STEPS,
        seed=42,
        log_every_steps=1,
        save_every_steps=None,
        keep_checkpoints=2,
        save_in_background=True,
        evaluate_every_steps=None,
        load_best_at_end=False,
        early_stopping_patience=None,
        resume="never",
        resume_anyway=[],
    )
    return replace(
        config,
        recipe=None,
        title="",
        dataset=DatasetConfig(source=Source.synthetic, synthetic=synthetic),
        optimizer=replace(config.optimizer, learning_rate=_LEARNING_RATE),
        schedule=ScheduleConfig(name=ScheduleName.constant),
        tracking=TrackingConfig(),
        evaluation=EvaluationConfig(tasks=[], after=False),
        training=training,
    )


def recall_measurement(
    config: RunConfig, batch: BatchPlan | None, machine: Machine | None = None
) -> Measurement | None:
    """The measurement of a configuration on this machine; None if there is none, or its ranks start elsewhere.

    The machine is looked at if none is given.
    """
    if batch is None or not is_measurable(config) or not _folder().is_dir():
        return None
    try:
        content = json.loads(measurement_file(config, batch, machine or detect_machine()).read_text(encoding="utf-8"))
        return Measurement(**content)
    except (OSError, ValueError, TypeError):
        return None


def keep_measurement(measurement: Measurement, config: RunConfig, batch: BatchPlan, machine: Machine) -> None:
    """Write a measurement into the cache; a cache that cannot be written keeps nothing."""
    remember(measurement_file(config, batch, machine), json.dumps(asdict(measurement), indent=2) + "\n")


def is_measurable(config: RunConfig) -> bool:
    """Whether all ranks start on this machine."""
    return config.launcher.name is LauncherName.local and config.hardware.num_nodes == 1


def measurement_file(config: RunConfig, batch: BatchPlan, machine: Machine) -> Path:
    """Where the measurement of a configuration is kept: by everything that changes memory."""
    hardware = config.hardware
    gpus = machine.gpus[: world_size(config)]
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts = {
        "config": comparable_config(measured_config(config, batch)),
        "hardware": [hardware.generation.name, world_size(config)],
        "gpus": sorted({(gpu.name, gpu.memory_gib) for gpu in gpus}),
        "packages": versions,
        "variables": {name: text for name, text in sorted(os.environ.items()) if name.startswith(_ALLOCATOR)},
    }
    return _folder() / f"{sha256_text(json.dumps(facts, sort_keys=True))[:32]}.json"


def read_steps(lines: Sequence[Mapping[str, Any]], row_length: int, date: str) -> Measurement:
    """The measurement in the training lines of `metrics.jsonl`: peaks over all steps, the speed of the last one."""

    def peaks(key: str) -> list[float]:
        return [max(values) for values in zip(*(line.get(key) or [] for line in lines), strict=True)]

    return Measurement(
        date=date,
        row_length=row_length,
        memory_gib=peaks("memory_gib"),
        memory_reserved_gib=peaks("memory_reserved_gib"),
        memory_device_gib=peaks("memory_device_gib"),
        tokens_per_second_per_gpu=lines[-1]["tokens_per_second_per_gpu"],
    )


def _folder() -> Path:
    return cache_root() / "measured_memory"
