"""A configuration and what a checkpoint of it belongs to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.checkpoint.record import Identity
from tunebook.config.choices import Generation, PeftMethod, Strategy
from tunebook.config.frozen import plain_config
from tunebook.config.identity import config_hash, result_settings
from tunebook.config.schema import (
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    PeftSettings,
    RunConfig,
)
from tunebook.record.manifest import describe_model


@pytest.fixture(scope="session")
def resolved() -> RunConfig:
    """A small model, on two ranks of a CPU."""
    return plain_config(
        recipe="small",
        model=ModelConfig(path="book:recipes/quickstart/model"),
        dataset=DatasetConfig(path="train.jsonl"),
        hardware=HardwareConfig(generation=Generation.cpu, gpus_per_node=2),
        parallelism=ParallelismConfig(strategy=Strategy.ddp),
        peft=PeftSettings(method=PeftMethod.full),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


@pytest.fixture
def config(resolved: RunConfig) -> RunConfig:
    """The same, for a test to change."""
    return copy.deepcopy(resolved)


@pytest.fixture(scope="session")
def identity(resolved: RunConfig) -> Identity:
    """What the configuration's checkpoints belong to, on data that were never prepared."""
    config = resolved
    return Identity(
        strategy=config.parallelism.strategy.name,
        peft=config.peft.method.name,
        world_size=2,
        model=describe_model(config.model),
        config_sha256=config_hash(config),
        settings=result_settings(config),
        data_sha256="d" * 64,
        tokenizer_sha256="e" * 64,
        chat_template_sha256="f" * 64,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that is yet to be made."""
    return tmp_path / "run"


@pytest.fixture
def save(make_checkpoint: Callable[..., Path], run: Path, identity: Identity) -> Callable[..., Path]:
    """Save a checkpoint of the configuration."""
    return lambda step, **changes: make_checkpoint(run, step, identity=replace(identity, **changes))
