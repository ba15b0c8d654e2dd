"""What a machine and its environment may lack for a configuration that keeps every rule."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tunebook.config.choices import (
    Attention,
    Compute,
    Generation,
    LauncherName,
    Offload,
    OptimizerName,
    PackingMode,
    PeftMethod,
    Strategy,
    Switch,
    TrackerName,
)
from tunebook.config.model_facts import LayerFacts
from tunebook.config.schema import (
    SlurmConfig,
    ZeroConfig,
)
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.train import requirements as environment
from tunebook.train.requirements import check_environment

ON_CPU = {
    "hardware.generation": Generation.cpu,
    "precision.compute": Compute.fp32,
    "precision.tf32": Switch.disabled,
    "attention.implementation": Attention.sdpa,
}
ON_VOLTA = {
    "hardware.generation": Generation.volta,
    "precision.compute": Compute.fp32,
    "precision.tf32": Switch.disabled,
    "attention.implementation": Attention.sdpa,
}


def zero(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    return {"parallelism": ZeroConfig(strategy=strategy, **settings), "hardware.gpus_per_node": 1}


@pytest.fixture
def installed(monkeypatch):
    """`installed({"torch": "2.13.0"})`: exactly these packages are installed."""

    def install(packages):
        monkeypatch.setattr(environment, "installed_version", packages.get)

    return install


H200 = ("NVIDIA H200", (9, 0))
GPU_PACKAGES = {"torch": "2.13.0", "flash-attn": "2.8.3"}


def ids(problems):
    return [problem.id for problem in problems]


def test_a_sound_environment(sound, machine, installed):
    installed(GPU_PACKAGES)
    assert check_environment(sound, machine(H200)) == []


@pytest.mark.parametrize(
    ("values", "package", "key"),
    [
        (zero(Strategy.zero2), "deepspeed", "parallelism.strategy"),
        ({"optimizer.name": OptimizerName.paged_adamw_8bit}, "bitsandbytes", "optimizer.name"),
        ({"peft.method": PeftMethod.lora}, "peft", "peft.method"),
        ({"model.liger_kernel": True}, "liger-kernel", "model.liger_kernel"),
        ({"precision.compute": Compute.fp8}, "torchao", "precision.compute"),
        ({"evaluation.tasks": ["gsm8k"]}, "lm_eval", "evaluation.tasks"),
        ({"tracking.name": TrackerName.wandb}, "wandb", "tracking.name"),
        ({"tracking.name": TrackerName.trackio}, "trackio", "tracking.name"),
        ({"attention.implementation": Attention.flash_attention_4}, "flash-attn-4", "attention.implementation"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(sound, changed, machine, installed, values, package, key):
    config = changed(sound, values)
    installed(GPU_PACKAGES)
    (problem,) = check_environment(config, machine(H200))
    assert (problem.id, problem.key) == ("missing-package", key)
    assert package in problem.message
    assert "pip install" in problem.fix
    installed({**GPU_PACKAGES, package: "1.0"})
    assert check_environment(config, machine(H200)) == []


def test_kernels_for_packed_rows_are_asked_for_before_a_gpu_is_used(sound, changed, machine, installed):
    layers = {"num_layers": 2, "parameters": 1}
    gated = changed(
        sound,
        {
            "model.facts.measured": LayerFacts(
                **layers, largest_parameter=1, active_parameters=1, linear_parameters=1, packing_packages=["fla-core"]
            )
        },
    )
    installed(GPU_PACKAGES)
    (problem,) = check_environment(gated, machine(H200))
    assert (problem.id, problem.key) == ("missing-package", "packing.mode")
    assert problem.message == "Qwen2ForCausalLM keeps packed documents apart by fla-core, not installed here"
    assert problem.fix == "packing.mode=padded packing.row_length=null or pip install fla-core"
    assert check_environment(changed(gated, UNPACKED), machine(H200)) == []
    installed({**GPU_PACKAGES, "fla-core": "0.6.0"})
    assert check_environment(gated, machine(H200)) == []


UNPACKED = {"packing.mode": PackingMode.padded, "packing.row_length": None}


@pytest.mark.parametrize(
    ("asked", "install"),
    [
        (Attention.flash_attention_2, "pip install flash-attn --no-build-isolation"),
        (Attention.flash_attention_4, "pip install flash-attn-4==4.0.0b36"),
        (Attention.flash_attention_3, None),  # its package is on no registry
    ],
)
def test_instead_of_a_missing_attention_package_auto_uses_what_is_installed(
    sound, changed, machine, installed, asked, install
):
    installed({"torch": "2.13.0"})
    (problem,) = check_environment(changed(sound, {"attention.implementation": asked}), machine(H200))
    assert problem.fix == ("attention=auto" if install is None else f"attention=auto or {install}")


COMPILED = {"model.compile_layers": True, "attention.implementation": Attention.varlen_attention}
COMPILED_ON_CPU = {
    "model.compile_layers": True,
    "hardware.generation": Generation.cpu,
    "precision.compute": Compute.fp32,
    "precision.tf32": Switch.disabled,
    "attention.implementation": Attention.sdpa,
}


def test_blocks_are_not_compiled_without_a_compiler(sound, changed, machine, installed):
    installed(GPU_PACKAGES)
    here, config = replace(machine(H200), missing_for_triton="no compiler is found here"), changed(sound, COMPILED)
    (problem,) = check_environment(config, here)
    assert (problem.id, problem.key) == ("compiled-layers-without-compiler", "model.compile_layers")
    config.model.compile_layers = False  # as the fix says
    assert check_environment(config, here) == []
    assert check_environment(changed(sound, COMPILED_ON_CPU), replace(here, gpus=[])) == []
    config = changed(sound, COMPILED)
    config.launcher = SlurmConfig(name=LauncherName.slurm)
    assert check_environment(config, here) == []


def test_what_auto_decides_to_compile_it_can(undecided, machine, installed):
    """The rule is for those who ask by name: left open, blocks are compiled only where that works."""
    installed(GPU_PACKAGES)
    for missing in (None, "no compiler is found here"):
        here = replace(machine(H200), missing_for_triton=missing)
        taken = resolve_auto(undecided, here).config
        assert taken.model.compile_layers is (missing is None)
        taken.attention.implementation = Attention.sdpa  # whatever is installed where the test runs
        assert check_environment(taken, here) == []


def test_without_a_gpu_only_that_is_said(sound, machine, installed):
    installed({})
    (problem,) = check_environment(sound, machine())
    assert problem.id == "no-gpu-here"
    assert "no NVIDIA driver answers here" in problem.message


def test_a_cluster_looks_for_itself(sound, changed, machine, installed):
    installed({})
    assert check_environment(changed(sound, {"launcher": SlurmConfig(name=LauncherName.slurm)}), machine()) == []


@pytest.mark.parametrize(
    ("gpus", "id", "match"),
    [
        ([("Tesla V100", (7, 0))], "other-gpu-here", r"hopper is set, and this machine has Tesla V100 \(volta\)"),
        ([H200], "too-few-gpus-here", "2 GPUs are asked for, and 1 are found"),
        ([H200, ("NVIDIA A100", (8, 0)), H200], "mixed-gpus", "ampere, hopper"),
    ],
)
def test_other_hardware_than_planned(sound, changed, machine, installed, gpus, id, match):
    installed(GPU_PACKAGES)
    config = changed(sound, {"parallelism.strategy": Strategy.ddp, "hardware.gpus_per_node": 2})
    (problem,) = check_environment(config, machine(*gpus))
    assert problem.id == id
    assert re.search(match, problem.message)


def test_a_gpu_that_torch_has_forgotten(sound, changed, machine, installed):
    installed(GPU_PACKAGES)
    config = changed(sound, ON_VOLTA)
    (problem,) = check_environment(config, machine(("GeForce GTX 1080", (6, 1))))
    assert problem.id == "gpu-too-old"
    assert "6.1" in problem.message


@pytest.mark.parametrize(
    ("torch", "generation", "capability", "driver", "expected", "match"),
    [
        ("2.13.0", Generation.ampere, (8, 0), "535.104.05", "driver-too-old", r"volta image \(torch 2\.10\.0\)"),
        ("2.13.0", Generation.ampere, (8, 0), "470.82", "driver-too-old", "no image"),
        ("2.10.0", Generation.ampere, (8, 0), "535.104.05", None, ""),
        ("2.13.0+cpu", Generation.ampere, (8, 0), "580.65", "torch-without-gpu-code", "is a CPU build"),
        ("2.13.0", Generation.volta, (7, 0), "580.65", "torch-without-gpu-code", "no code for compute capability 7.0"),
        ("2.10.0", Generation.volta, (7, 0), "580.65", None, ""),
    ],
)
def test_torch_must_fit_gpu_and_driver(
    sound, changed, machine, installed, torch, generation, capability, driver, expected, match
):
    installed({"torch": torch})
    config = changed(sound, {**ON_VOLTA, "hardware.generation": generation})
    problems = check_environment(config, machine(("a GPU", capability), driver=driver))
    assert ids(problems) == ([expected] if expected else [])
    assert all(re.search(match, problem.message) for problem in problems)


def test_the_nvme_folder_must_be_there(sound, changed, machine, installed, tmp_path, monkeypatch):
    installed({**GPU_PACKAGES, "deepspeed": "0.19.8"})
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = {"offload_optimizer": Offload.nvme, "nvme_path": "~/disk"}
    config = changed(sound, zero(Strategy.zero3, **settings))
    (problem,) = check_environment(config, machine(H200))
    assert (problem.id, problem.fix.split(" or ")[0]) == ("nvme-path-not-found", f"mkdir -p {tmp_path}/disk")
    (tmp_path / "disk").mkdir()
    assert check_environment(config, machine(H200)) == []


def test_the_nvme_disk_must_hold_the_states(sound, changed, machine, installed, tmp_path, monkeypatch):
    """16 bytes for each of 494,032,768 parameters are 7.36 GiB."""
    installed({**GPU_PACKAGES, "deepspeed": "0.19.8"})
    config = changed(sound, zero(Strategy.zero3, offload_optimizer=Offload.nvme, nvme_path=str(tmp_path)))
    free = 16 * 494_032_768
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert check_environment(config, machine(H200)) == []
    free -= 1
    (problem,) = check_environment(config, machine(H200))
    assert (problem.id, problem.key) == ("nvme-too-small", "parallelism.nvme_path")
    assert problem.message.startswith("7.4 GiB are free on the disk of ")
    assert problem.message.endswith("and the states take 7.4")
