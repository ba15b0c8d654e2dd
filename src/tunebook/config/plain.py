"""A configuration without Hydra: for what is loaded or worked out with no recipe behind it."""

from __future__ import annotations

from typing import Any

from tunebook.config.choices import LauncherName, Strategy
from tunebook.config.schema import (
    ActivationConfig,
    AttentionConfig,
    DatasetConfig,
    EvaluationConfig,
    HardwareConfig,
    LauncherConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ParallelismConfig,
    PeftSettings,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainingConfig,
)


def plain_config(**given: Any) -> RunConfig:
    """A `RunConfig` of the given fields; each other section holds its schema's defaults, on one device of one process.

    Nothing is resolved or checked, and there is nothing to train: no task, no learning rate, rows of no tokens.
    """
    sections: dict[str, Any] = {
        "model": ModelConfig(),
        "dataset": DatasetConfig(),
        "parallelism": ParallelismConfig(strategy=Strategy.single),
        "hardware": HardwareConfig(),
        "precision": PrecisionConfig(),
        "attention": AttentionConfig(),
        "packing": PackingConfig(),
        "activation": ActivationConfig(),
        "peft": PeftSettings(),
        "optimizer": OptimizerConfig(learning_rate=0.0),
        "schedule": ScheduleConfig(),
        "launcher": LauncherConfig(name=LauncherName.local),
        "tracking": TrackingConfig(),
        "evaluation": EvaluationConfig(tasks=[]),
        "training": TrainingConfig(max_length=0),
    }
    return RunConfig(**(sections | given))
