"""The host's memory against what there is of it: the verdict, the error and what is printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.config.choices import Generation, LauncherName
from tunebook.config.compose import compose
from tunebook.errors import DoesNotFitError
from tunebook.facts.generations import generation_of
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory.host_memory import plan_host_memory
from tunebook.plan.show import host_memory_lines

from ..plans import NO_GPU, resolved


@pytest.mark.parametrize(
    ("capacity", "fits", "said"),
    [
        (None, None, "is not known: hardware.host_memory_gib is not set"),
        (931.0, False, "does not fit: 1,087.9 GiB are offloaded to a host of 931 GiB"),
        (1160.0, False, "does not fit: 1,360.9 GiB of host memory at the peak are more than 1,160 GiB"),
        (1216.0, None, "1,360.9 GiB at the peak leave little of 1,216 GiB"),
        (1440.0, None, "1,360.9 GiB at the peak leave little of 1,440 GiB"),
        (1536.0, True, "fits into 90% of the host's 1,536 GiB"),
    ],
)
def test_llama_2_70b_on_one_node(capacity: float | None, fits: bool | None, said: str) -> None:
    plan = plan_host_memory(resolved("llama2_70b_fsdp_1node"), capacity)
    assert plan.fits is fits
    assert said in plan.verdict
    if fits is False:
        with pytest.raises(DoesNotFitError, match=r"host_memory_gib=GIB") as caught:
            plan.raise_if_too_large()
        assert (caught.value.exit_code, caught.value.problem_id) == (3, "host-memory-too-small")
    else:
        plan.raise_if_too_large()


def test_two_nodes_share_what_is_offloaded() -> None:
    one = plan_host_memory(resolved("llama2_70b_fsdp_1node"), None).memory
    two = plan_host_memory(resolved("llama2_70b_fsdp_1node", "hardware.num_nodes=2"), None).memory
    assert one.offload is not None and two.offload == pytest.approx(one.offload / 2)


def test_a_cpu_is_not_refused_twice() -> None:
    """What does not fit there is said of each rank's memory."""
    config = resolved("qwen05b_single", "hardware=cpu", "model.liger_kernel=false")
    plan = plan_host_memory(config, 8.0)
    assert plan.memory.training is not None and plan.memory.training > 8
    assert plan.fits is None


def test_a_model_of_unknown_size_has_no_numbers() -> None:
    config = resolved("qwen05b_single")
    plan = plan_host_memory(replace(config, model=replace(config.model, facts=None)), 64.0)
    assert plan.memory.to_json() == {
        "processes": None, "training": None, "loading": None, "offload": None, "saving": None, "total": None,
        "capacity": 64.0,
    }  # fmt: skip
    assert (plan.nvme_gib, plan.fits) == (None, None)
    assert "nor is the model's size" in plan.verdict


def test_the_lines_for_people() -> None:
    lines = host_memory_lines(plan_host_memory(resolved("llama2_70b_fsdp_1node"), 1536.0))
    assert lines[0] == "Host memory of each node (estimated, GiB, of 1,536)"
    assert lines[1] == "  processes 16.0, loading 513.9, offload 1,087.9, saving 257.0; 1,360.9 at the peak"
    assert lines[2] == "  fits into 90% of the host's 1,536 GiB"
    lines = host_memory_lines(plan_host_memory(resolved("dolly3b_zero3_nvme"), None))
    assert "  on its NVMe disk 51.7" in lines


def test_whose_memory_is_meant() -> None:
    """This machine's where the ranks start here; else only what is said."""
    gpu = Gpu(
        name="NVIDIA H200", memory_gib=140.4, compute_capability=(9, 0), generation=generation_of((9, 0)).generation
    )
    machine = Machine(gpus=[gpu], driver="580.65.06", num_cpus=8, host_memory_gib=200.0)

    config = compose("qwen05b_single", []).config

    def known(
        machine: Machine, launcher: str = "local", said: float | None = None, generation: str = "auto"
    ) -> float | None:
        config.launcher.name, config.hardware.host_memory_gib = LauncherName[launcher], said
        config.hardware.generation = Generation[generation]
        return resolve_auto(config, machine).host_memory_gib

    assert known(machine) == 200.0
    assert known(machine, said=64.0) == 64.0
    assert known(machine, "slurm") is None
    assert known(machine, "slurm", said=64.0) == 64.0
    assert known(machine, generation="volta") is None  # it cannot run here
    assert known(NO_GPU) is None
    assert known(NO_GPU, generation="cpu") == 8.0
