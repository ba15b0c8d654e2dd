"""The memory of one GPU or rank, part by part, as known before a run; unknown parts are None.

The numbers come from `plan.memory`. `auto` uses the same numbers to decide about activation checkpointing. If two
optimizer steps were measured (`record.measurement`), their peak replaces the estimated one. The parts stay estimates,
since a measured peak does not show its parts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.data.batch import BatchPlan
from tunebook.hardware.detect import Machine
from tunebook.model.parameters import known_facts
from tunebook.plan.memory import (
    GIB,
    MARGIN,
    USABLE_SHARE,
    Estimate,
    estimate_memory,
    gib_text,
    margin_of,
    unknown_size,
)
from tunebook.plan.memory.overhead import overhead_bytes
from tunebook.record.measurement import Measurement, recall_measurement

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
    fits, verdict = _judge(config, estimate, overhead, capacity)
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


def _judge(config: RunConfig, estimate: Estimate, overhead: float, capacity: float | None) -> tuple[bool | None, str]:
    """Fits if the tensors fit into the usable share; does not fit if they surely exceed the capacity.

    Only part of the overhead is measured. It can turn a yes into unknown, but never gives a yes.
    """
    if capacity is None:
        return None, f"{_NOT_KNOWN}: hardware.memory_gib is not set"
    tensors, margin = estimate.total_gib, margin_of(config)
    if estimate.states_gib > capacity or tensors > capacity * SURELY_TOO_LARGE:
        return False, f"does not fit: {tensors:.1f} GiB are more than {capacity:g} GiB"
    if tensors > capacity:
        why = f"{tensors:.1f} GiB of tensors are more than {capacity:g} GiB, and the estimate may be too high"
        return None, f"{_NOT_KNOWN}: {why}"
    without = f"{tensors:.1f} GiB (or {margin:.0%} more) without the overhead"
    share = f"{USABLE_SHARE:.0%} of {capacity:g} GiB"
    if tensors * (1 + margin) / (1 + MARGIN) > capacity * USABLE_SHARE:
        return None, f"{_NOT_KNOWN}: {without}, more than {share}, which leaves little for it"
    if tensors + overhead > capacity * (1 + _ROUNDING):
        return None, f"{_NOT_KNOWN}: with an overhead of about {overhead:.1f} GiB it is more than {capacity:g} GiB"
    return True, f"fits: {without}, no more than {share}"


_EQUAL_ROWS = 0.98  # rows of at least this share of the measured length count as measured


def measured_memory(config: RunConfig, batch: BatchPlan | None, machine: Machine | None = None) -> MemoryPlan | None:
    """The plan from measurements of this configuration on this machine; None if there are none.

    A measurement does not count if the prepared documents make shorter rows than the two steps had. On an H100 the
    estimate for rows of 28,800 tokens was right within 1%, and a measurement with rows of 32,768 was 12% higher.
    """
    measurement = recall_measurement(config, batch, machine)
    if measurement is None:
        return None
    longest = batch.longest_row if batch is not None else None
    if longest and longest < _EQUAL_ROWS * measurement.row_length:
        return None
    return judge_measurement(config, plan_memory(config, batch), measurement)


def judge_measurement(config: RunConfig, estimated: MemoryPlan, measurement: Measurement) -> MemoryPlan:
    """The estimated plan with the measured peak, and whether that fits.

    Two completed steps prove that what they held fits into that much memory. The overhead of the plan is everything
    that they held besides tensors. Steps that ran out of memory have no peak: the numbers stay estimates.
    """
    if measurement.ran_out is not None:
        verdict = f"does not fit: {_steps(measurement)}, ended early: {measurement.ran_out}"
        return replace(estimated, fits=False, verdict=verdict, measured=measurement)
    tensors, held = _peak(config, measurement)
    memory = replace(estimated.memory, overhead=held - tensors, total=held)
    took = f"{gib_text(held)} in each process"
    if config.hardware.generation is not Generation.cpu:
        took = f"{gib_text(tensors)} of tensors and {gib_text(held)} in all"
    fits, verdict = _judge_peak(tensors, held, memory.capacity, f"{_steps(measurement)}, took {took}")
    return MemoryPlan(memory=memory, fits=fits, verdict=verdict, measured=measurement)


def _peak(config: RunConfig, measurement: Measurement) -> tuple[float, float]:
    """GiB of tensors, and of everything that the run held, of the rank with the most.

    A process on a CPU records only its total memory. Its libraries are subtracted as the estimate counts them.
    """
    if config.hardware.generation is Generation.cpu:
        held = max(measurement.memory_gib)
        return max(0.0, held - overhead_bytes(config, 0.0) / GIB), held
    tensors = max(measurement.memory_gib)
    return tensors, max(tensors, *measurement.memory_reserved_gib, *measurement.memory_device_gib)


def _judge_peak(tensors: float, held: float, capacity: float | None, what: str) -> tuple[bool | None, str]:
    if capacity is None:
        return None, f"whether it fits is not known: hardware.memory_gib is not set; {what}"
    if held <= capacity:
        return True, f"fits: {what}, of {capacity:g} GiB"
    if tensors > capacity:
        return False, f"does not fit: {what}, more than {capacity:g} GiB"
    return None, f"whether it fits is not known: {what}, and the allocator may take less where there is less"


def _steps(measurement: Measurement) -> str:
    return f"two steps with rows of {measurement.row_length:,} tokens, measured on {measurement.date}"
