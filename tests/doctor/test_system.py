"""Shared memory, limits, host memory, swap and clock, at their thresholds."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from tunebook.doctor import system
from tunebook.doctor.findings import Level
from tunebook.doctor.system import (
    check_system,
    clock,
    clock_difference,
    limits,
    read_meminfo,
    shared_memory,
    swap,
)

from .conftest import CPU_ONLY, only, resolved

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("free", "num_gpus", "level"),
    [
        (GIB, 8, Level.ok),
        (GIB - 1, 8, Level.warning),
        (128 * MIB, 8, Level.warning),
        (64 * MIB, 8, Level.error),  # Docker's own
        (64 * MIB, 1, Level.warning),
        (64 * MIB, 0, Level.warning),
    ],
)
def test_shared_memory(free: int, num_gpus: int, level: Level) -> None:
    found = shared_memory(max(free, 2 * GIB), free, num_gpus=num_gpus)
    assert found.level is level
    assert ("--shm-size=16g" in (found.fix or "")) is (level is not Level.ok)


def test_only_free_shared_memory_counts() -> None:
    assert shared_memory(16 * GIB, 10 * MIB, num_gpus=2).level is Level.error


def test_without_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "SHARED_MEMORY", tmp_path / "missing")
    found = only(check_system(CPU_ONLY, None, tmp_path, has_cards=False, of_host=[]), "shm-size")
    assert (found.level, "No such file or directory" in found.what) == (Level.warning, True)


@pytest.fixture
def set_limits(monkeypatch: pytest.MonkeyPatch):
    def install(memlock: int, nofile: int, stack: int) -> None:
        values = {
            resource.RLIMIT_MEMLOCK: memlock, resource.RLIMIT_NOFILE: nofile, resource.RLIMIT_STACK: stack,
        }  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", lambda number: (values[number], resource.RLIM_INFINITY))

    return install


def test_limits_that_are_wide_enough(set_limits) -> None:
    set_limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert {finding.level for finding in limits(None, has_cards=True)} == {Level.ok}
    set_limits(8 * MIB, 4096, 8 * MIB)
    assert {finding.level for finding in limits(None, has_cards=False)} == {Level.ok}


def test_limits_that_are_too_narrow(set_limits) -> None:
    set_limits(8 * MIB, 4095, 8 * MIB - 1)
    found = limits(None, has_cards=True)
    assert [finding.level for finding in found] == [Level.warning] * 3
    assert only(found, "limit-memlock").what == "ulimit -l (locked memory): 8 MiB; InfiniBand locks gigabytes"
    assert only(found, "limit-nofile").fix.startswith("ulimit -n 65536")


def test_locked_memory_matters_to_a_recipe_that_offloads_to_nvme(set_limits) -> None:
    set_limits(8 * MIB, 4096, 8 * MIB)
    found = only(limits(resolved("dolly3b_zero3_nvme"), has_cards=False), "limit-memlock")
    assert (found.level, found.data["needed_by"]) == (Level.warning, "offload to NVMe")


MEMINFO = """\
MemTotal:       24678912 kB
MemFree:          102400 kB
MemAvailable:   12582912 kB
SwapTotal:       8388608 kB
SwapFree:        8388608 kB
HugePages_Total:       0
nonsense
"""


def test_the_kernels_table(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text(MEMINFO)
    memory = read_meminfo(file)
    assert memory["MemAvailable"] == 12 * GIB
    assert memory["SwapTotal"] == 8 * GIB
    assert read_meminfo(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    ("total", "free", "level"), [(0, 0, Level.ok), (8, 8, Level.ok), (8, 6, Level.ok), (8, 5, Level.warning)]
)
def test_swap(total: int, free: int, level: Level) -> None:
    found = swap({"SwapTotal": total * GIB, "SwapFree": free * GIB})
    assert found.level is level
    assert found.data["used_gib"] == total - free


@pytest.mark.parametrize(
    ("ahead", "level", "word"),
    [(0, Level.ok, "agrees"), (1, Level.ok, "agrees"), (30, Level.warning, "ahead of"), (-30, Level.warning, "behind")],
)
def test_a_file_server_with_a_clock_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: int, level: Level, word: str
) -> None:
    real = time.time
    monkeypatch.setattr(system.time, "time", lambda: real() - ahead)
    assert clock_difference(tmp_path) == pytest.approx(ahead, abs=1)
    (found,) = clock(tmp_path, None)
    assert (found.level, word in found.what) == (level, True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_has_no_clock(tmp_path: Path) -> None:
    assert clock(tmp_path / "missing", None) == []


def test_the_clocks_of_other_nodes_are_said_to_be_unchecked(tmp_path: Path) -> None:
    (found,) = clock(tmp_path, resolved("llama2_70b_fsdp"))
    assert "the clocks of 1 other node were not checked" in found.what
    assert found.data["nodes_not_checked"] == 1
