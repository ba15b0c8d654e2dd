"""The memory of one GPU or rank, part by part, as far as it is known before a run: what nothing computes yet is None.

The numbers are those of `config.estimate`, by which `auto` decides about activation checkpointing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from tunebook.config.estimate import USABLE_SHARE, Estimate, estimate_memory
from tunebook.config.schema import RunConfig

_NOT_KNOWN = "whether it fits is not known"
# Rows may be shorter than planned and the estimate too high: only what is this much more than the memory is refused.
SURELY_TOO_LARGE = 1.15


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Estimated GiB of one GPU or rank."""

    weights: float | None = None
    gradients: float | None = None
    optimizer: float | None = None
    activations: float | None = None  # and the output head
    buffers: float | None = None  # what is whole or in another number format for a time, and DDP's buckets
    overhead: float | None = None  # CUDA context, communication, unusable pieces: nothing computes it yet
    total: float | None = None  # of the parts that are known, where only the overhead is not
    capacity: float | None

    def to_json(self) -> dict[str, float | None]:
        """The `memory_gib` part of a plan."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The parts, and whether they fit."""

    memory: Memory
    fits: bool | None  # None: the estimate is too rough to say
    verdict: str  # the same as a sentence, with its reason


def plan_memory(config: RunConfig) -> MemoryPlan:
    """Estimate a resolved configuration's memory and judge it."""
    facts, capacity = config.model.facts, config.hardware.memory_gib
    if facts is None:
        return MemoryPlan(memory=Memory(capacity=capacity), fits=None, verdict=f"{_NOT_KNOWN}: nor is the model's size")
    estimate = estimate_memory(config, facts)
    parts = Memory(
        weights=estimate.weights_gib,
        gradients=estimate.gradients_gib,
        optimizer=estimate.optimizer_gib,
        activations=estimate.activations_gib,
        buffers=estimate.buffers_gib,
        total=estimate.total_gib,
        capacity=capacity,
    )
    fits, verdict = _judge(estimate, capacity)
    return MemoryPlan(memory=parts, fits=fits, verdict=verdict)


def _judge(estimate: Estimate, capacity: float | None) -> tuple[bool | None, str]:
    """Yes where everything fits into the usable share, no where it is more than there is."""
    if capacity is None:
        return None, f"{_NOT_KNOWN}: hardware.memory_gib is not set"
    if estimate.total_gib <= capacity * USABLE_SHARE:
        return True, f"fits into {USABLE_SHARE:.0%} of {capacity:g} GiB"
    if estimate.states_gib > capacity or estimate.total_gib > capacity * SURELY_TOO_LARGE:
        return False, f"does not fit: {estimate.total_gib:.1f} GiB are more than {capacity:g} GiB"
    return None, f"{_NOT_KNOWN}: more than {USABLE_SHARE:.0%} of {capacity:g} GiB leaves little for the overhead"
