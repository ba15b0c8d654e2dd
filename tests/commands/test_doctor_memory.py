"""The host's memory against what a run needs of it, on the machine of the command and on other nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.commands.doctor import host_memory, offloaded_gib
from tunebook.doctor.findings import Level
from tunebook.doctor.system import GIB

from ..doctor.conftest import CPU_ONLY, machine_with, resolved


@pytest.mark.parametrize(("available", "level"), [(12, Level.ok), (2, Level.ok), (1, Level.warning)])
def test_free_host_memory(available: int, level: Level) -> None:
    found = host_memory(machine_with(), None, {"MemAvailable": available * GIB})
    assert found.level is level


def test_a_container_may_use_less_than_is_free() -> None:
    assert host_memory(CPU_ONLY, None, {"MemAvailable": 100 * GIB}).data["free_gib"] == 8.0


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ((), 0),
        # 8 ranks: moments, and blocks of 2 GiB of master, gradient, weights on their way back and the largest gradient
        (("parallelism=zero2_offload",), 8 * (2.874 + 4 * 2)),
        # master copy and moments; blocks of the gradient, of gradients as they arrive, of all weights and of each
        (("parallelism=zero3_offload",), 8 * (4.311 + 3 * 2 + 2.096)),
        (("parallelism=fsdp_offload",), 8 * (2.874 + 2 * 2.096)),
        (("parallelism=zero3_offload", "parallelism.pin_memory=false"), 24 * 3085938688 / GIB),
    ],
)
def test_what_is_offloaded(words: tuple[str, ...], gib: float) -> None:
    assert offloaded_gib(resolved("qwen3b_zero2", *words)) == pytest.approx(gib, rel=1e-3)


def test_of_an_adapter_only_its_own_states_are_offloaded() -> None:
    assert 0 < offloaded_gib(resolved("zero2_lora")) < 1


def test_states_that_do_not_fit_into_the_host() -> None:
    config = resolved("qwen3b_zero2", "parallelism=zero2_offload")
    found = host_memory(CPU_ONLY, config, {"MemAvailable": 8 * GIB})
    assert (found.level, "87.0 GiB of states are offloaded" in found.what) == (Level.error, True)
    assert host_memory(machine_with(), config, {"MemAvailable": 40 * GIB}).level is Level.warning
    assert host_memory(machine_with(), config, {"MemAvailable": 400 * GIB}).level is Level.ok


@pytest.mark.parametrize(
    ("words", "level", "said"),
    [
        ((), Level.ok, "is not known here: say it with hardware.host_memory_gib=GIB"),
        (("hardware.host_memory_gib=512",), Level.ok, "; by estimate this fits into 90% of the host's 512 GiB"),
        (("hardware.host_memory_gib=200",), Level.warning, " at the peak leave little of 200 GiB"),
        (("hardware.host_memory_gib=16",), Level.error, "; by estimate this does not fit: 87.0 GiB are offloaded"),
    ],
)
def test_a_machine_that_only_submits_is_not_where_the_memory_is_needed(
    words: tuple[str, ...], level: Level, said: str
) -> None:
    config = resolved("qwen3b_zero2", "parallelism=zero2_offload", "hardware=hopper", "launcher=slurm", *words)
    found = host_memory(CPU_ONLY, config, {"MemAvailable": 4 * GIB})
    assert (found.level, said in found.what) == (level, True), found.what
    assert ", of them 87.0 offloaded" in found.what
    assert (found.fix is None) == (level is Level.ok)
    assert found.data["usable_gib"] == config.hardware.host_memory_gib


def test_what_offloads_too_much_is_told_what_a_plan_is_and_not_what_it_does_already() -> None:
    config = resolved("qwen3b_zero2", "parallelism=zero3_nvme", "parallelism.nvme_path=FOLDER")

    def fix(capacity: float) -> str:
        machine = replace(machine_with(), host_memory_gib=capacity)
        return host_memory(machine, config, {"MemAvailable": int(capacity * GIB)}).fix or ""

    on_gpus = "parallelism=fsdp without parallelism.offload_optimizer, parallelism.offload_parameters"
    assert f"; try {on_gpus} (27.5 GiB) or peft=lora (31.7 GiB), or take " in fix(40.0)
    assert f"; no change that was estimated is enough, {on_gpus} needs least (27.5 GiB); " in fix(8.0)
    assert "zero3_nvme" not in fix(8.0)
    assert fix(8.0).endswith("take machines with more memory")
