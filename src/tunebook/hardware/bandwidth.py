"""The bandwidth between GPUs, as nccl-tests count it, and the last measurement on these GPUs, kept in the cache.

It is kept by the GPUs' identities, the driver and NCCL's variables, so that a card that was exchanged, or another way
between the same cards (NCCL_P2P_DISABLE=1), is measured again.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Sizes are in bytes: for all-reduce of the
buffer, for all-gather of what every rank holds afterwards. GB are 1e9 bytes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunebook.files import atomic_write_json, cache_root, sha256_text
from tunebook.hardware.detect import Machine

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
OPERATIONS = (ALL_REDUCE, ALL_GATHER)
_GB = 1e9


def algorithm_gb_per_s(num_bytes: int, seconds: float) -> float:
    """The size divided by the time."""
    return num_bytes / seconds / _GB


def bus_gb_per_s(operation: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """What each link carries: the algorithm bandwidth times the share of the size that one rank must send."""
    return algorithm_gb_per_s(num_bytes, seconds) * bus_factor(operation, num_ranks)


def bus_factor(operation: str, num_ranks: int) -> float:
    """2(n-1)/n for all-reduce, (n-1)/n for all-gather."""
    share = (num_ranks - 1) / num_ranks
    return 2 * share if operation == ALL_REDUCE else share


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One operation at one size. Bandwidths as nccl-tests count them, in GB (1e9 bytes) a second."""

    operation: str
    bytes: int
    runs: int
    seconds: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What was measured; `problem` says what ended it early, with what was measured before."""

    backend: str
    num_ranks: int
    measurements: list[Measurement]
    problem: str | None = None
    is_late: bool = False  # the time limit ended it
    wrong: list[str] | None = None  # ranks that received wrong numbers, and in what

    def best(self, operation: str) -> Measurement | None:
        """The measurement of an operation with the highest bandwidth."""
        found = [one for one in self.measurements if one.operation == operation]
        return max(found, key=lambda one: one.bus_gb_per_s, default=None)

    def to_json(self) -> dict[str, Any]:
        """The `bandwidth` part of `doctor --json`."""
        return {
            "backend": self.backend,
            "num_ranks": self.num_ranks,
            "problem": self.problem,
            "measurements": [asdict(one) for one in self.measurements],
        }


def remember(bandwidth: Bandwidth, machine: Machine) -> None:
    """Keep a measurement between GPUs that ended well; a cache that cannot be written is no reason to fail."""
    if bandwidth.backend != "nccl" or bandwidth.problem is not None or bandwidth.wrong:
        return
    file = _file(machine, bandwidth.num_ranks)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(file, bandwidth.to_json())
    except OSError:
        return


def recall(machine: Machine, num_gpus: int) -> Bandwidth | None:
    """What was last measured between the first `num_gpus` visible GPUs; None where nothing readable is kept."""
    try:
        kept: dict[str, Any] = json.loads(_file(machine, num_gpus).read_text(encoding="utf-8"))
        measurements = [Measurement(**one) for one in kept["measurements"]]
        return Bandwidth(backend=str(kept["backend"]), num_ranks=int(kept["num_ranks"]), measurements=measurements)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _file(machine: Machine, num_gpus: int) -> Path:
    gpus = [gpu.uuid or f"{gpu.index}: {gpu.name}" for gpu in machine.gpus[:num_gpus]]
    facts: list[Any] = [machine.driver, gpus]
    if variables := _nccl_variables():
        facts.append(variables)
    identity = json.dumps(facts)
    return cache_root() / "links" / f"{sha256_text(identity)[:16]}.json"


def _nccl_variables() -> dict[str, str]:
    """What may change the way that NCCL takes: all of its variables but those that say what it logs."""
    names = sorted(name for name in os.environ if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG"))
    return {name: os.environ[name] for name in names}
