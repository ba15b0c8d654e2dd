"""Recipes as they are resolved on a machine without a GPU; each is composed once."""

from __future__ import annotations

import copy
from functools import cache

from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import Resolution, resolve_auto

# GPUs as NVML names them, with their compute capabilities.
H200 = ("NVIDIA H200", (9, 0))
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))
V100 = ("Tesla V100-SXM2-32GB", (7, 0))
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


@cache
def _resolved(recipe: str | None, words: tuple[str, ...]) -> Resolution:
    return resolve_auto(compose(recipe, [*words], []).config, NO_GPU)


def resolution(recipe: str | None, *words: str) -> Resolution:
    """A copy that may be changed, which takes a hundredth of the time of composing it."""
    return copy.deepcopy(_resolved(recipe, words))


def resolved(recipe: str | None, *words: str) -> RunConfig:
    """The configuration of it."""
    return resolution(recipe, *words).config
