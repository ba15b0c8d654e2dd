"""Whether a run fits: the memory of one GPU or rank, and of one node's host, against what there is.

One rule judges both; `auto`, suggestions and refusals use it. What a run needs is its estimate with a margin. It fits
if that takes at most `USABLE_SHARE` of the memory. It does not fit if the estimate alone is more than the memory.
Between the two it is tight. If two optimizer steps were measured, their peak replaces a GPU's estimate
(`record.measurement`); the parts stay estimates, since a measured peak does not show its parts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace

from tunebook.config.choices import Checkpointing, Generation
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.batch import BatchPlan
from tunebook.facts.compiling import CHEAP_BUDGET
from tunebook.facts.sharing import is_offloaded
from tunebook.facts.strategies import strategy_facts
from tunebook.hardware.detect import Machine
from tunebook.model.parameters import known_facts
from tunebook.parallel.deepspeed import nvme_bytes
from tunebook.plan.memory import GIB, Estimate, estimate_memory
from tunebook.plan.memory.activations import is_recomputed
from tunebook.plan.memory.host import PROCESS_BYTES, HostBytes, host_bytes
from tunebook.record.measurement import Measurement, recall_measurement

# Share by which a run may take more than its estimate. The wide margin is for what is not run: the order in which
# DeepSpeed's stage 3 gathers and the engines copy from and to the host, and inductor's schedule of a recomputed layer.
MARGIN, WIDE_MARGIN = 0.04, 0.15
# The rest is for other processes, the system and the page cache. The fullest runs on H200s had 83% to 86% of tensors.
USABLE_SHARE = 0.94
# The CUDA context with torch's libraries: 781 MiB before the first tensor (pytorch#34323). NCCL's buffers: 544 MiB
# between 2 GPUs, 688 MiB between more, on 4 A100 with NVLink (nccl#964).
CUDA_CONTEXT_GIB, NCCL_GIB = 781 / 1024, 688 / 1024
# The allocator's blocks that are too small for the next request: 5% to 7% of the tensors on nearly full H200s. Where
# memory is left it holds up to 50%, and frees that when it is needed (benchmarks/results/h200_memory.jsonl).
ALLOCATOR_SHARE = 0.06


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """GiB of one GPU or rank, or of one node's host, and the verdict whether they fit."""

    parts: dict[str, float | None]
    total: float | None = None  # at the peak; a host's parts do not all exist at once
    margin: float = 0.0  # what a run may take more than `total`
    capacity: float | None
    fits: bool | None  # None: tight, or unknown
    verdict: str  # such as "fits: 57.5 of 80 GiB"
    measured: Measurement | None = None  # source of the total; None: it is estimated
    nvme_gib: float | None = None  # of a host: on its disk

    @property
    def allocated(self) -> float | None:
        """Of a GPU: tensors alone, torch's peak of allocated memory, which runs record as `memory_gib`."""
        return None if self.total is None else self.total - (self.parts["overhead"] or 0.0)

    @property
    def needed(self) -> float | None:
        """The estimate with its margin: what the verdict compares with the capacity."""
        return None if self.total is None else self.total + self.margin

    @property
    def is_tight(self) -> bool:
        """Whether it may fit: the estimate does, and with its margin it does not."""
        return self.fits is None and self.total is not None and self.capacity is not None

    def to_json(self) -> dict[str, float | None]:
        """The `memory_gib` or `host_memory_gib` part of a plan."""
        values = self.parts | {"total": self.total, "capacity": self.capacity}
        if "overhead" in self.parts:
            values["allocated"] = self.allocated
        return {key: _rounded(value) for key, value in values.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


def plan_memory(config: RunConfig, batch: BatchPlan | None = None) -> MemoryPlan:
    """Estimate the memory of one GPU or rank of a resolved configuration, and judge it.

    `batch` says whether a step takes several passes and, if solved with the documents' lengths, how long its rows get.
    """
    facts, capacity = known_facts(config), config.hardware.memory_gib
    if facts is None:
        return _unknown([*_names(Estimate), "overhead"], capacity)
    accumulates = None if batch is None or batch.accumulation is None else batch.accumulation > 1
    estimate = estimate_memory(_with_rows_of(config, batch), facts, accumulates=accumulates)
    overhead = _overhead_gib(config, estimate.total_gib)
    total, margin = estimate.total_gib + overhead, estimate.total_gib * margin_of(config)
    fits, verdict = _judge(total, margin, capacity)
    parts = {**asdict(estimate), "overhead": overhead}
    return MemoryPlan(parts=parts, total=total, margin=margin, capacity=capacity, fits=fits, verdict=verdict)


def plan_host_memory(config: RunConfig, capacity: float | None) -> MemoryPlan:
    """Estimate a resolved configuration's host memory and judge it. `capacity`: GiB of a node; None if unknown."""
    facts = known_facts(config)
    if facts is None:
        return _unknown(_names(HostBytes), capacity)
    found = host_bytes(config, facts)
    peak = found.peak / GIB
    fits, verdict = _judge(peak, peak * MARGIN, capacity, is_host=True)
    return MemoryPlan(
        parts={name: num_bytes / GIB for name, num_bytes in asdict(found).items()},
        total=peak,
        margin=peak * MARGIN,
        capacity=capacity,
        fits=fits,
        verdict=verdict,
        nvme_gib=(config.hardware.gpus_per_node or 1) * nvme_bytes(config, facts) / GIB,
    )


def _names(parts: type[Estimate | HostBytes]) -> list[str]:
    return [field.name for field in fields(parts)]


def _unknown(names: list[str], capacity: float | None) -> MemoryPlan:
    verdict = "not known: the model is not on this machine (tunebook fetch downloads it), or torch is not installed"
    return MemoryPlan(parts=dict.fromkeys(names), capacity=capacity, fits=None, verdict=verdict)


def _judge(
    total: float, margin: float, capacity: float | None, *, is_host: bool = False, usable: float = USABLE_SHARE
) -> tuple[bool | None, str]:
    """Whether an estimate fits, and the verdict with its numbers; None if it is tight, or the capacity is unknown."""
    if capacity is None:
        key = "hardware.host_memory_gib" if is_host else "hardware.memory_gib"
        return None, f"not known: {gib(total + margin)} GiB, and {key} is not set"
    numbers = f"{gib(total + margin)} of {capacity:,g} GiB{' of host memory' if is_host else ''}"
    if total > capacity:
        return False, f"does not fit: {numbers}"
    if total + margin > usable * capacity:
        return None, f"tight: {numbers} with a margin of {gib(margin)}"
    return True, f"fits: {numbers}"


def _with_rows_of(config: RunConfig, batch: BatchPlan | None) -> RunConfig:
    """Return the configuration with the longest row of the data, which is shorter than allowed if a batch is small."""
    if batch is None or not batch.longest_row:
        return config
    return replace(
        config,
        packing=replace(config.packing, row_length=batch.longest_row),
        training=replace(config.training, micro_batch_size=batch.micro_batch_size),
    )


def margin_of(config: RunConfig) -> float:
    """Share by which a run may take more than its estimate."""
    budget = config.activation.memory_budget
    recomputes_products = is_recomputed(config) or (budget is not None and budget < CHEAP_BUDGET)
    is_compiled_again = bool(config.model.compile_layers) and recomputes_products
    is_wide = is_offloaded(config) or is_compiled_again or strategy_facts(config).is_zero3
    return WIDE_MARGIN if is_wide else MARGIN


def _overhead_gib(config: RunConfig, tensors_gib: float) -> float:
    """What a run needs besides tensors; on a CPU Python and its libraries."""
    if config.hardware.generation is Generation.cpu:
        return PROCESS_BYTES / GIB
    return CUDA_CONTEXT_GIB + (NCCL_GIB if world_size(config) > 1 else 0.0) + ALLOCATOR_SHARE * tensors_gib


def tensors_fit(config: RunConfig, *, memory_budget: float | None = None) -> bool | None:
    """Whether a run surely fits into a GPU by estimate; None if its memory or the model's size is unknown.

    With `memory_budget`: with that budget, and without activation checkpointing.
    """
    if memory_budget is not None:
        kept = replace(config.activation, checkpointing=Checkpointing.disabled, memory_budget=memory_budget)
        config = replace(config, activation=kept)
    plan = plan_memory(config)
    return None if plan.total is None or plan.capacity is None else plan.fits is True


def gib(value: float) -> str:
    """Format GiB: one decimal, or two significant digits below 1."""
    return f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


_EQUAL_ROWS = 0.98  # rows of at least this share of the measured length count as measured


def measured_memory(config: RunConfig, batch: BatchPlan | None, machine: Machine | None = None) -> MemoryPlan | None:
    """The plan from measurements of this configuration on this machine; None if there are none.

    A measurement does not count if the prepared documents make shorter rows than the two steps had: they take less.
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

    Two completed steps prove that what they held fits into that much memory. The overhead is then everything that they
    held besides tensors; the allocator may take less where there is less. Steps that ran out of memory have no peak:
    the numbers stay estimates. A process on a CPU records only its total memory, with its libraries.
    """
    if measurement.ran_out is not None:
        verdict = f"does not fit: two steps measured on {measurement.date} ended early: {measurement.ran_out}"
        return replace(estimated, fits=False, verdict=verdict, measured=measurement)
    peak = max(measurement.memory_gib)
    held = max([peak, *measurement.memory_reserved_gib, *measurement.memory_device_gib])
    is_cpu = config.hardware.generation is Generation.cpu
    tensors = max(0.0, peak - PROCESS_BYTES / GIB) if is_cpu else peak
    fits, verdict = _judge(tensors, held - tensors, estimated.capacity, usable=1.0)
    parts = estimated.parts | {"overhead": held - tensors}
    return replace(estimated, parts=parts, total=held, margin=0.0, fits=fits, verdict=verdict, measured=measurement)
