"""What to type to restrict a run to some of the GPUs: which are equal, and their names for CUDA.

A number names a GPU in CUDA's own order, in which the fastest comes first, while NVML counts in the order of the PCI
bus: with GPUs of different kinds the same number is another GPU. So they are named by their ids where those are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunebook.facts.generations import OLDEST_SUPPORTED, ComputeCapability
from tunebook.hardware.detect import VISIBLE_VARIABLE, Gpu


def equal_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The largest group of GPUs of one kind; of groups equally large the newest, then that with most memory.

    One that torch has code for comes before any other.
    """

    def rank(group: list[Gpu]) -> tuple[bool, int, ComputeCapability, float]:
        capability = min(gpu.compute_capability for gpu in group)
        return capability >= OLDEST_SUPPORTED, len(group), capability, min(gpu.memory_gib for gpu in group)

    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.name, []).append(gpu)
    return max(groups.values(), key=rank, default=[])


def visible_only(gpus: Sequence[Gpu]) -> str:
    """What to put in front of a command so that it sees these GPUs alone, in this order."""
    has_ids = all(gpu.uuid for gpu in gpus)
    return f"{VISIBLE_VARIABLE}={','.join(gpu.uuid if has_ids else str(gpu.index) for gpu in gpus)}"
