"""The memory of one GPU or rank, part by part, as known before a run; unknown parts are None.

The numbers come from `plan.memory`. `auto` uses the same numbers to decide about activation checkpointing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tunebook.config.schema import RunConfig
from tunebook.data.batch import BatchPlan
from tunebook.model.parameters import known_facts
from tunebook.plan.memory import GIB, USABLE_SHARE, Estimate, estimate_memory, unknown_size
from tunebook.plan.memory.overhead import overhead_bytes

if TYPE_CHECKING:
    from tunebook.record.measurement import Measurement

_NOT_KNOWN = "whether it fits is not known"
# Rows may be shorter than planned and the estimate too high. Refuse only above this multiple of the memory.
SURELY_TOO_LARGE = 1.15
_ROUNDING = 1e-9  # tolerance if the overhead equals all remaining memory


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Estimated GiB of one GPU or rank."""

    weights: float | None = None
    gradients: float | None = None
    optimizer: float | None = None
    activations: float | None = None  # and the output head
    buffers: float | None = None  # temporarily gathered or cast tensors, and DDP's buckets
    overhead: float | None = None  # fragmentation
    total: float | None = None  # sum of the parts
    capacity: float | None

    @property
    def allocated(self) -> float | None:
        """Tensors alone: torch's peak of allocated memory, which runs record as `memory_gib`."""
        return None if self.total is None else self.total - (self.overhead or 0.0)

    def to_json(self) -> dict[str, float | None]:
        """The `memory_gib` part of a plan."""
        return {key: _rounded(value) for key, value in (asdict(self) | {"allocated": self.allocated}).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory parts, and the verdict whether they fit."""

    memory: Memory
    fits: bool | None  # None: the estimate is too rough to say
    verdict: str  # the verdict as a sentence, with its reason
    measured: Measurement | None = None  # source of the peak; None: it is estimated

    @property
    def is_in_doubt(self) -> bool:
        """Whether the estimate exists but is too close to the capacity for a verdict."""
        return self.fits is None and self.memory.total is not None and self.memory.capacity is not None


def plan_memory(config: RunConfig, batch: BatchPlan | None = None) -> MemoryPlan:
    """Estimate a resolved configuration's memory and judge it.

    `batch` says whether a step takes several passes and, if solved with the documents' lengths, how long its rows get.
    """
    facts, capacity = known_facts(config), config.hardware.memory_gib
    if facts is None:
        return MemoryPlan(memory=Memory(capacity=capacity), fits=None, verdict=f"{_NOT_KNOWN}: {unknown_size(config)}")
    accumulates = None if batch is None or batch.accumulation is None else batch.accumulation > 1
    estimate = estimate_memory(_with_rows_of(config, batch), facts, accumulates=accumulates)
    overhead = overhead_bytes(config, estimate.total_gib * GIB, None if capacity is None else capacity * GIB) / GIB
    parts = Memory(
        weights=estimate.weights_gib,
        gradients=estimate.gradients_gib,
        optimizer=estimate.optimizer_gib,
        activations=estimate.activations_gib,
        buffers=estimate.buffers_gib,
        overhead=overhead,
        total=estimate.total_gib + overhead,
        capacity=capacity,
    )
    fits, verdict = _judge(estimate, overhead, capacity)
    return MemoryPlan(memory=parts, fits=fits, verdict=verdict)


def _with_rows_of(config: RunConfig, batch: BatchPlan | None) -> RunConfig:
    """Return the configuration with the longest row of the data, which is shorter than allowed if a batch is small."""
    if batch is None or not batch.longest_row:
        return config
    return replace(
        config,
        packing=replace(config.packing, row_length=batch.longest_row),
        training=replace(config.training, micro_batch_size=batch.micro_batch_size),
    )


def _judge(estimate: Estimate, overhead: float, capacity: float | None) -> tuple[bool | None, str]:
    """Fits if the tensors fit into the usable share; does not fit if they surely exceed the capacity.

    Only part of the overhead is measured. It can turn a yes into unknown, but never gives a yes.
    """
    if capacity is None:
        return None, f"{_NOT_KNOWN}: hardware.memory_gib is not set"
    tensors = estimate.total_gib
    if estimate.states_gib > capacity or tensors > capacity * SURELY_TOO_LARGE:
        return False, f"does not fit: {tensors:.1f} GiB are more than {capacity:g} GiB"
    if tensors > capacity:
        why = f"{tensors:.1f} GiB of tensors are more than {capacity:g} GiB, and the estimate may be too high"
        return None, f"{_NOT_KNOWN}: {why}"
    without, share = f"{tensors:.1f} GiB without the overhead", f"{USABLE_SHARE:.0%} of {capacity:g} GiB"
    if tensors > capacity * USABLE_SHARE:
        return None, f"{_NOT_KNOWN}: {without}, more than {share}, which leaves little for it"
    if tensors + overhead > capacity * (1 + _ROUNDING):
        return None, f"{_NOT_KNOWN}: with an overhead of about {overhead:.1f} GiB it is more than {capacity:g} GiB"
    return True, f"fits: {without}, no more than {share}"
