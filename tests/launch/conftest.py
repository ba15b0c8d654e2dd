"""Small configurations, written out rather than composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunebook.config.choices import Generation, LauncherName, Strategy
from tunebook.config.frozen import plain_config
from tunebook.config.launchers import LauncherConfig, RayConfig, SlurmConfig
from tunebook.config.schema import DatasetConfig, HardwareConfig, ParallelismConfig, RunConfig

_LAUNCHERS = {"local": LauncherConfig, "slurm": SlurmConfig, "ray": RayConfig}


def small_config(
    launcher: str = "local",
    *,
    nodes: int = 1,
    gpus: int = 1,
    generation: Generation = Generation.hopper,
    sections: dict[str, Any] | None = None,
    **settings: Any,
) -> RunConfig:
    """A configuration named `small`, with `settings` of its launcher and other sections of it."""
    return plain_config(
        recipe="small",
        hardware=HardwareConfig(generation=generation, num_nodes=nodes, gpus_per_node=gpus),
        parallelism=ParallelismConfig(strategy=Strategy.ddp if nodes * gpus > 1 else Strategy.single),
        launcher=_LAUNCHERS[launcher](name=LauncherName[launcher], **settings),
        **{"dataset": DatasetConfig(path="train.jsonl")} | (sections or {}),
    )


@pytest.fixture(scope="session")
def small() -> Callable[..., RunConfig]:
    """`small("slurm", nodes=2, gpus=8, partition="gpu")`."""
    return small_config
