from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tunebook.config.choices import Generation
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.hardware.detect import Gpu, Machine
from tunebook.sweep import shares as module
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.shares import Share, Shares, num_at_once, uses_this_machine

JOBLIB = SweepOptions(launcher="joblib")


def config(num_gpus: int, generation: Generation = Generation.hopper, *words: str) -> RunConfig:
    found = compose("quickstart", list(words)).config
    found.hardware.generation, found.hardware.gpus_per_node = generation, num_gpus
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """This machine, with so many GPUs and cores."""

    def have(num_gpus: int, num_cores: int) -> None:
        gpu = {"name": "H200", "memory_gib": 139.0, "compute_capability": (9, 0), "generation": Generation.hopper}
        gpus = [Gpu(**gpu, index=number, uuid=f"GPU-{number}") for number in range(num_gpus)]  # type: ignore[arg-type]
        found = Machine(gpus=gpus, driver="580", num_cpus=num_cores, host_memory_gib=100.0)
        monkeypatch.setattr(module, "detect_machine", lambda: found)
        monkeypatch.setattr(module, "own_cores", lambda: list(range(num_cores)))

    return have


def test_a_share_is_what_the_trial_sees() -> None:
    share = Share(gpus=("GPU-a", "GPU-b"), num_threads=4)
    assert share.environment({"A": "1", "CUDA_VISIBLE_DEVICES": "0,1,2"}) == {
        "A": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "OMP_NUM_THREADS": "4",
    }
    assert share.environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"  # the user's own
    assert Share().environment({"A": "1"}) == {"A": "1"}


def test_gpus_are_dealt_out_in_disjoint_sets_and_given_back(machine: Callable[[int, int], None]) -> None:
    machine(4, 32)
    shares = module.machine_shares(2)
    with shares.share_of(config(2)) as first, shares.share_of(config(2)) as second:
        assert (first.gpus, second.gpus) == (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"))
        assert (first.num_threads, first.cores) == (8, ())  # 32 cores / (2 trials x 2 ranks)
    with shares.share_of(config(4)) as whole:
        assert sorted(whole.gpus) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


def test_a_trial_waits_until_enough_gpus_are_free() -> None:
    shares = Shares(["0", "1", "2"], list(range(4)), 3)
    got: list[tuple[str, ...]] = []

    def take() -> None:
        with shares.share_of(config(2)) as share:
            got.append(share.gpus)

    with shares.share_of(config(2)) as first:
        waiting = threading.Thread(target=take)
        waiting.start()
        time.sleep(0.2)
        assert got == []
    waiting.join(5)
    assert got == [first.gpus]


def test_many_trials_never_hold_the_same_gpu() -> None:
    shares = Shares([str(number) for number in range(5)], list(range(8)), 4)
    held: set[str] = set()
    lock = threading.Lock()
    problems: list[str] = []

    def work(num_gpus: int) -> None:
        for _ in range(20):
            with shares.share_of(config_of[num_gpus]) as share:
                with lock:
                    if held & set(share.gpus) or len(share.gpus) != num_gpus:
                        problems.append(str(share))
                    held.update(share.gpus)
                time.sleep(0.001)
                with lock:
                    held.difference_update(share.gpus)

    config_of = {number: config(number) for number in (1, 2, 3)}
    threads = [threading.Thread(target=work, args=(1 + number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert problems == []
    assert held == set()


def test_cores_are_dealt_out_on_a_cpu() -> None:
    shares = Shares([], [0, 1, 2, 3, 4], 2)
    on_cpu = config(2, Generation.cpu)
    with shares.share_of(on_cpu) as first, shares.share_of(on_cpu) as second:
        assert (first.cores, second.cores) == ((0, 1), (2, 3))
        assert first.num_threads == 1  # 2 cores / 2 ranks
    with Shares([], [0, 1, 2, 3], 1).share_of(on_cpu) as alone:
        assert alone == Share()


def test_what_runs_on_a_cluster_takes_nothing_here() -> None:
    elsewhere = config(8, Generation.hopper, "launcher=ray")
    assert not uses_this_machine(elsewhere)
    assert uses_this_machine(config(8, Generation.hopper, "launcher=ray", "launcher.address=local"))
    with Shares([], [0], 1).share_of(elsewhere) as share:
        assert share == Share()
    assert num_at_once(JOBLIB, [elsewhere], 20) == 8
    assert num_at_once(SweepOptions(launcher="joblib", jobs=12), [elsewhere], 20) == 12


def test_as_many_as_fit_unless_asked_for_fewer(machine: Callable[[int, int], None]) -> None:
    machine(8, 64)
    assert num_at_once(JOBLIB, [config(2), config(3)], 20) == 2  # 8 // 3
    assert num_at_once(JOBLIB, [config(1)], 5) == 5
    assert num_at_once(SweepOptions(launcher="joblib", jobs=3), [config(2)], 20) == 3
    assert num_at_once(SweepOptions(), [config(1)], 20) == 1
    assert num_at_once(JOBLIB, [config(4, Generation.cpu)], 20) == 16


def test_more_than_fit_are_refused_with_the_numbers(machine: Callable[[int, int], None]) -> None:
    machine(8, 64)
    asked = SweepOptions(launcher="joblib", jobs=5)
    with pytest.raises(RequestError, match=r"--jobs=5: a trial takes 2 GPUs, and this machine has 8 GPUs.*so 4 at a"):
        num_at_once(asked, [config(2)], 20)
    with pytest.raises(RequestError, match=r"takes 8 GPUs.*type --jobs=1, or fewer GPUs per trial: hardware.gpus_per"):
        num_at_once(asked, [config(8)], 20)
    machine(0, 4)
    with pytest.raises(RequestError, match=r"--jobs=5: a trial takes 1 rank, and this machine has 4 CPU cores"):
        num_at_once(asked, [config(1, Generation.cpu)], 20)
