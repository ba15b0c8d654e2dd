"""The host memory and NVMe space that one node needs, compared with its capacity if that is known.

The numbers come from `plan.memory.host`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.errors import DoesNotFitError
from tunebook.model.parameters import known_facts
from tunebook.plan.memory import GIB, estimate_memory, unknown_size
from tunebook.plan.memory.host import HostBytes, host_bytes

_NOT_KNOWN = "whether the host's memory is enough is not known"
_TRY = (
    "offload less to the host, or take more nodes or fewer GPUs of each (hardware.gpus_per_node); "
    "hardware.host_memory_gib=GIB sets what a node has"
)
# The system, page cache and data need some of it. A peak below this share fits.
USABLE_SHARE = 0.9
# Refuse only above this multiple: a process may need less than assumed.
SURELY_TOO_LARGE = 1.15


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Estimated GiB of the node of rank 0."""

    processes: float | None = None
    training: float | None = None
    loading: float | None = None
    offload: float | None = None
    saving: float | None = None
    total: float | None = None  # at the peak; not the sum, since loading and saving do not overlap
    capacity: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """The `host_memory_gib` part of a plan."""
        return {name: None if value is None else round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Host memory parts, and the verdict whether they fit."""

    memory: HostMemory
    nvme_gib: float | None  # on the node's disk; 0 if nothing is offloaded to it
    fits: bool | None  # None: unknown
    verdict: str

    def raise_if_too_large(self) -> None:
        """Raise DoesNotFitError if the host's memory is surely too small."""
        if self.fits is False:
            raise DoesNotFitError(f"by estimate this plan {self.verdict}; {_TRY}", problem_id="host-memory-too-small")


def plan_host_memory(config: RunConfig, capacity: float | None) -> HostPlan:
    """Estimate a resolved configuration's host memory and judge it. `capacity`: GiB of a node; None if unknown."""
    facts = known_facts(config)
    if facts is None:
        verdict = f"{_NOT_KNOWN}: {unknown_size(config)}"
        memory = HostMemory(capacity=capacity)
        return HostPlan(memory=memory, nvme_gib=None, fits=None, verdict=verdict)
    found = host_bytes(config, facts, tensors=estimate_memory(config, facts).total_gib * GIB)
    fits, verdict = _judge(config, found, capacity)
    gib = {name: num_bytes / GIB for name, num_bytes in asdict(found).items()}
    nvme_gib = gib.pop("nvme")
    memory = HostMemory(**gib, total=found.peak / GIB, capacity=capacity)
    return HostPlan(memory=memory, nvme_gib=nvme_gib, fits=fits, verdict=verdict)


def _judge(config: RunConfig, found: HostBytes, capacity: float | None) -> tuple[bool | None, str]:
    """Fits if the peak is within the usable share; does not fit if it surely exceeds the capacity."""
    if capacity is None:
        return None, f"{_NOT_KNOWN}: hardware.host_memory_gib is not set"
    peak, offload = found.peak / GIB, found.offload / GIB
    if offload > capacity:
        return False, f"does not fit: {offload:,.1f} GiB are offloaded to a host of {capacity:,g} GiB"
    is_cpu = config.hardware.generation is Generation.cpu  # judged as each rank's memory, with its own message
    if peak > capacity * SURELY_TOO_LARGE and not is_cpu:
        return False, f"does not fit: {peak:,.1f} GiB of host memory at the peak are more than {capacity:,g} GiB"
    if peak > capacity * USABLE_SHARE:
        return None, f"{_NOT_KNOWN}: {peak:,.1f} GiB at the peak leave little of {capacity:,g} GiB"
    return True, f"fits into {USABLE_SHARE:.0%} of the host's {capacity:,g} GiB"
