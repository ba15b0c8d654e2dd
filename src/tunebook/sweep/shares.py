"""Divide one machine among parallel trials: each GPU and core belongs to one trial at a time.

A trial sees only its own GPUs (CUDA_VISIBLE_DEVICES). On a CPU it runs on its own cores, so that its threads and data
workers do not use another trial's cores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tunebook.config.choices import Generation, LauncherName
from tunebook.config.schema import RayConfig, RunConfig
from tunebook.errors import RequestError, counted
from tunebook.hardware.detect import VISIBLE_VARIABLE, detect_machine
from tunebook.processes import own_cores
from tunebook.sweep.options import SweepOptions

_T = TypeVar("_T")
_MAX_CLUSTER_TRIALS = 8  # trials that run on a cluster only wait here


@dataclass(frozen=True, kw_only=True)
class Share:
    """The GPUs and cores of one trial; empty if nothing is divided."""

    gpus: tuple[str, ...] = ()  # in the form of CUDA_VISIBLE_DEVICES
    cores: tuple[int, ...] = ()
    num_threads: int | None = None  # per rank

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a trial with this share. A thread count set by the user is kept."""
        environment = dict(inherited)
        if self.gpus:
            environment[VISIBLE_VARIABLE] = ",".join(self.gpus)
        if self.num_threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self.num_threads))
        return environment


class Shares:
    """Assigns GPUs and cores to `num_at_once` trials; thread-safe."""

    def __init__(self, gpus: list[str], cores: list[int], num_at_once: int) -> None:
        size = max(1, len(cores) // num_at_once)
        self._gpus, self._num_gpus = list(gpus), len(gpus)
        self._slots = [tuple(cores[start : start + size]) for start in range(0, size * num_at_once, size)]
        self._num_cores = size if num_at_once > 1 else None  # of each trial; None: nothing is divided
        self._changed = threading.Condition()

    @contextmanager
    def share_of(self, config: RunConfig) -> Iterator[Share]:
        """Hold the share of a trial until it has ended; wait while others hold it."""
        num_ranks = config.hardware.gpus_per_node or 1
        threads = None if self._num_cores is None else max(1, self._num_cores // num_ranks)
        if not uses_this_machine(config):
            yield Share()
        elif config.hardware.generation is Generation.cpu:
            with self._taken(self._slots, 1) as slots:
                yield Share(cores=() if threads is None else slots[0], num_threads=threads)
        else:
            with self._taken(self._gpus, min(num_ranks, self._num_gpus)) as gpus:
                yield Share(gpus=tuple(gpus), num_threads=threads)

    @contextmanager
    def _taken(self, free: list[_T], count: int) -> Iterator[list[_T]]:
        with self._changed:
            self._changed.wait_for(lambda: len(free) >= count)
            taken = free[:count]
            del free[:count]
        try:
            yield taken
        finally:
            with self._changed:
                free[:0] = taken
                self._changed.notify_all()


def machine_shares(num_at_once: int) -> Shares:
    """Return the shares of this machine, limited to what this process may use."""
    # By UUID: CUDA and the driver number GPUs differently unless CUDA_DEVICE_ORDER is set.
    gpus = [gpu.uuid or str(gpu.index) for gpu in detect_machine().gpus]
    return Shares(gpus, own_cores(), num_at_once)


def uses_this_machine(config: RunConfig) -> bool:
    """Whether a trial's ranks run on this machine, not where a cluster's scheduler places them."""
    if isinstance(config.launcher, RayConfig):
        return config.launcher.address == "local"
    return config.launcher.name is LauncherName.local


def num_at_once(
    options: SweepOptions, configs: list[RunConfig], num_trials: int, most_divided: int | None = None
) -> int:
    """Return how many trials run at a time. `most_divided` is the number of trials that share the GPUs, if divided.

    Raises: RequestError if that many do not fit on this machine.
    """
    if options.launcher == "basic":
        return 1
    here = [config for config in configs if uses_this_machine(config)]
    if options.launcher == "slurm" or not here:
        return min(options.jobs or _MAX_CLUSTER_TRIALS, num_trials)
    most_needed = max(config.hardware.gpus_per_node or 1 for config in here)
    is_on_cpu = all(config.hardware.generation is Generation.cpu for config in here)
    available = len(own_cores()) if is_on_cpu else len(detect_machine().gpus)
    fit = max(1, available // most_needed)
    wanted = options.jobs or fit
    if most_divided is not None:
        wanted = min(wanted, most_divided)
    if wanted > fit:
        unit, rank = ("CPU core", "rank") if is_on_cpu else ("GPU", "GPU")
        each = max(1, available // wanted)
        fewer = f", or fewer {rank}s per trial: hardware.gpus_per_node={each}" if most_needed > 1 else ""
        raise RequestError(
            f"--jobs={options.jobs}: a trial takes {counted(most_needed, rank)}, and this machine has "
            f"{counted(available, unit)} for them, so {fit} at a time fit and more would share what they compute on; "
            f"type --jobs={fit}{fewer}",
            problem_id="sweep-jobs",
        )
    return min(wanted, num_trials)
