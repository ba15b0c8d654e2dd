"""What a machine, its environment or its image may lack for a configuration that keeps every rule."""

from __future__ import annotations

import json
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
from tunebook.config.launchers import SlurmConfig
from tunebook.config.model_facts import LayerFacts
from tunebook.config.schema import ZeroConfig
from tunebook.errors import RequestError
from tunebook.facts.generations import GENERATIONS, capability_text
from tunebook.hardware.image import IMAGE_FILE_VARIABLE
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.train import requirements
from tunebook.train.requirements import check_environment, hardware_problem, refuse_wrong_image

V100, T4 = ("Tesla V100-SXM2-32GB", (7, 0)), ("Tesla T4", (7, 5))
A100, L4 = ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA L4", (8, 9))
H200, B200 = ("NVIDIA H200", (9, 0)), ("NVIDIA B200", (10, 0))
GPU_PACKAGES = {"torch": "2.13.0", "flash-attn": "2.8.3"}
ON_SLURM = {"launcher": SlurmConfig(name=LauncherName.slurm)}
IN_FP32 = {
    "precision.compute": Compute.fp32, "precision.tf32": Switch.disabled, "attention.implementation": Attention.sdpa,
}  # fmt: skip
# What the wheels of these versions on the package registry have code for.
FLAGS = {
    "2.10.0": ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    "2.13.0": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
}


def zero(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    return {"parallelism": ZeroConfig(strategy=strategy, **settings), "hardware.gpus_per_node": 1}


@pytest.fixture
def installed(monkeypatch):
    """`installed({"torch": "2.13.0"})`: exactly these packages are installed."""

    def install(packages):
        monkeypatch.setattr(requirements, "installed_version", packages.get)
        monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", packages.get)

    return install


@pytest.fixture
def inside(monkeypatch, tmp_path, installed):
    """`inside("ampere")`: as if this ran in that image, with its torch and flash-attn installed."""

    def go(generation: str) -> None:
        pins = next(facts.image for facts in GENERATIONS.values() if facts.image.name == generation)
        served = [facts for facts in GENERATIONS.values() if facts.image is pins]
        has_flash = generation not in ("cpu", "volta")
        facts = {
            "generation": generation, "torch": pins.torch, "cuda": pins.cuda, "min_driver": pins.min_driver,
            "compute_capabilities": [capability_text(cc) for one in served for cc in one.compute_capabilities],
            "arch_list": [] if generation == "cpu" else FLAGS[pins.torch],
            "attention": "flash-attn-2" if has_flash else "none",
            "lock_sha256": "1" * 64, "sources_sha256": "2" * 64, "git_commit": None, "git_diff_sha256": None,
            "base_image": "debian:12.12-slim", "packages": {},
        }  # fmt: skip
        (tmp_path / "image.json").write_text(json.dumps(facts))
        monkeypatch.setenv(IMAGE_FILE_VARIABLE, str(tmp_path / "image.json"))
        installed({"torch": pins.torch} | ({"flash-attn": "2.8.3"} if has_flash else {}))

    return go


@pytest.fixture
def problem_of(undecided, machine):
    """The problem of a recipe that leaves everything open, with these GPUs."""

    def find(*gpus, driver="580.65.06", **hardware):
        config = replace(undecided, recipe="a_recipe", hardware=replace(undecided.hardware, **hardware))
        return hardware_problem(
            resolve_auto(config, machine(*gpus, driver=driver)).config, machine(*gpus, driver=driver)
        )

    return find


# Packages


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
        ({"attention.implementation": Attention.flash_attention_4}, "flash-attn-4", "attention.implementation"),
        ({"attention.implementation": Attention.flash_attention_3}, "flash-attn-3", "attention.implementation"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(sound, changed, machine, installed, values, package, key):
    config = changed(sound, values)
    installed(GPU_PACKAGES)
    (problem,) = check_environment(config, machine(H200))
    assert (problem.id, problem.key) == ("missing-package", key)
    assert package in problem.message
    assert ("pip install" in problem.fix) is (package != "flash-attn-3")  # which is in no registry
    assert problem.fix.startswith("attention=auto") is (key == "attention.implementation")
    installed({**GPU_PACKAGES, package: "1.0"})
    assert check_environment(config, machine(H200)) == []


def test_kernels_for_packed_rows_are_asked_for_before_a_gpu_is_used(sound, changed, machine, installed):
    layers = LayerFacts(
        num_layers=2, parameters=1, largest_parameter=1, active_parameters=1, linear_parameters=1,
        packing_packages=["fla-core"],
    )  # fmt: skip
    gated = changed(sound, {"model.facts.measured": layers})
    installed(GPU_PACKAGES)
    (problem,) = check_environment(gated, machine(H200))
    assert (problem.id, problem.key) == ("missing-package", "packing.mode")
    assert problem.fix == "packing.mode=padded packing.row_length=null or pip install fla-core"
    padded = changed(gated, {"packing.mode": PackingMode.padded, "packing.row_length": None})
    assert check_environment(padded, machine(H200)) == []
    installed({**GPU_PACKAGES, "fla-core": "0.6.0"})
    assert check_environment(gated, machine(H200)) == []


def test_blocks_are_compiled_only_with_a_compiler(sound, undecided, changed, machine, installed):
    installed(GPU_PACKAGES)
    here = replace(machine(H200), missing_for_triton="no compiler is found here")
    config = changed(sound, {"model.compile_layers": True, "attention.implementation": Attention.varlen_attention})
    (problem,) = check_environment(config, here)
    assert (problem.id, problem.key) == ("compiled-layers-without-compiler", "model.compile_layers")
    assert check_environment(changed(config, ON_SLURM), here) == []
    on_cpu = changed(config, IN_FP32 | {"hardware.generation": Generation.cpu})
    assert check_environment(on_cpu, replace(here, gpus=[])) == []
    assert resolve_auto(undecided, here).config.model.compile_layers is False


# GPUs


def test_without_a_gpu_only_that_is_reported_and_not_for_a_cluster(sound, changed, machine, installed):
    installed({})
    (problem,) = check_environment(sound, machine())
    assert problem.id == "no-gpu-here"
    assert check_environment(changed(sound, ON_SLURM), machine()) == []


@pytest.mark.parametrize(
    ("generation", "gpus", "id"),
    [
        ("hopper", [V100], "other-gpu-here"),
        ("hopper", [H200], "too-few-gpus-here"),
        ("hopper", [H200, A100, H200], "mixed-gpus"),
        ("volta", [("GeForce GTX 1080", (6, 1))] * 2, "gpu-too-old"),
    ],
)
def test_other_hardware_than_planned(sound, changed, machine, installed, generation, gpus, id):
    installed(GPU_PACKAGES)
    two = {"parallelism.strategy": Strategy.ddp, "hardware.gpus_per_node": 2}
    config = changed(sound, IN_FP32 | two | {"hardware.generation": Generation[generation]})
    (problem,) = check_environment(config, machine(*gpus))
    assert problem.id == id


@pytest.mark.parametrize(
    ("torch", "generation", "capability", "driver", "expected"),
    [
        ("2.13.0", Generation.ampere, (8, 0), "535.104.05", ("driver-too-old", "pip install torch==2.10.0")),
        ("2.13.0", Generation.ampere, (8, 0), "470.82", ("driver-too-old", "update the NVIDIA driver")),
        ("2.10.0", Generation.ampere, (8, 0), "535.104.05", None),
        ("2.13.0+cpu", Generation.ampere, (8, 0), "580.65", ("torch-without-gpu-code", "hardware.generation=cpu")),
        ("2.13.0", Generation.volta, (7, 0), "580.65", ("torch-without-gpu-code", "pip install torch==2.10.0")),
        ("2.10.0", Generation.volta, (7, 0), "580.65", None),
    ],
)
def test_torch_must_fit_gpu_and_driver(
    sound, changed, machine, installed, torch, generation, capability, driver, expected
):
    installed({"torch": torch})
    config = changed(sound, IN_FP32 | {"hardware.generation": generation})
    problems = check_environment(config, machine(("a GPU", capability), driver=driver))
    assert [(problem.id, problem.fix) for problem in problems] == ([expected] if expected else [])


# Images


@pytest.mark.parametrize(
    ("image", "gpu"),
    [
        ("volta", V100), ("volta", T4), ("ampere", A100), ("ampere", L4), ("hopper", H200), ("blackwell", B200),
        ("volta", H200),  # torch 2.10.0 has its code, and there is no attention package that would lack it
    ],
)  # fmt: skip
def test_images_that_serve_a_gpu(inside, problem_of, image, gpu):
    inside(image)
    assert problem_of(gpu) is None


@pytest.mark.parametrize(
    ("image", "gpu", "driver", "fix"),
    [
        ("hopper", V100, "580.65.06", "make train RECIPE=a_recipe GPU=volta"),  # torch 2.13.0 has no code for it
        ("hopper", A100, "580.65.06", "make train RECIPE=a_recipe GPU=ampere"),  # flash-attn was compiled for 9.0
        ("cpu", H200, "580.65.06", "make train RECIPE=a_recipe GPU=hopper"),
        ("hopper", A100, "535.104.05", "make train RECIPE=a_recipe GPU=volta"),
        ("hopper", A100, "470.82.01", "another GPU or a newer driver: no image runs on these"),
        ("blackwell", ("NVIDIA Thor", (11, 0)), "580.65.06", "another GPU or a newer driver: no image runs on these"),
    ],
)
def test_a_gpu_in_another_generations_image(inside, problem_of, image, gpu, driver, fix):
    inside(image)
    problem = problem_of(gpu, driver=driver)
    assert (problem.id, problem.key, problem.fix) == ("wrong-image", "hardware.generation", fix)


def test_no_gpu_is_found_in_an_image(inside, problem_of, undecided, machine):
    inside("hopper")
    assert problem_of().id == "no-gpu-in-image"
    hidden = replace(machine(), driver="580.65.06", notes=["CUDA_VISIBLE_DEVICES='' leaves 0 of 8 GPUs visible"])
    config = replace(undecided, hardware=replace(undecided.hardware, generation=Generation.hopper))
    problem = hardware_problem(config, hidden)
    assert problem.id == "no-gpu-here" and hidden.notes[0] in problem.message
    inside("cpu")
    problem = problem_of(generation=Generation.turing)
    assert problem.id == "wrong-image"
    assert problem.fix.startswith("make train RECIPE=a_recipe GPU=volta where the GPUs are")
    assert problem_of(generation=Generation.cpu) is problem_of(H200, generation=Generation.cpu) is None
    config.launcher = SlurmConfig(name=LauncherName.slurm)
    assert hardware_problem(config, machine()) is None  # a job can be submitted from any image


def test_a_trained_model_is_not_loaded_in_an_image_that_cannot_run_it(inside, machine, monkeypatch):
    def with_gpus(*gpus):
        monkeypatch.setattr(requirements, "detect_machine", lambda: machine(*gpus))

    with_gpus()
    refuse_wrong_image()  # outside of an image
    inside("hopper")
    with pytest.raises(RequestError) as caught:
        refuse_wrong_image()
    assert caught.value.problem_id == "no-gpu-in-image"
    with_gpus(V100)
    with pytest.raises(RequestError, match="try make env GPU=volta and the same again"):
        refuse_wrong_image()
    with_gpus(H200)
    refuse_wrong_image()
    inside("cpu")
    with_gpus()
    refuse_wrong_image()  # a model that GPUs have trained may be looked at on a laptop


# NVMe


def test_the_nvme_folder_must_exist_and_hold_the_states(sound, changed, machine, installed, tmp_path, monkeypatch):
    """16 bytes for each of 494,032,768 parameters."""
    installed({**GPU_PACKAGES, "deepspeed": "0.19.8"})
    monkeypatch.setenv("HOME", str(tmp_path))
    config = changed(sound, zero(Strategy.zero3, offload_optimizer=Offload.nvme, nvme_path="~/disk"))
    (problem,) = check_environment(config, machine(H200))
    assert (problem.id, problem.fix.split(" or ")[0]) == ("nvme-path-not-found", f"mkdir -p {tmp_path}/disk")
    (tmp_path / "disk").mkdir()
    for free, ids in ((16 * 494_032_768, []), (16 * 494_032_768 - 1, ["nvme-too-small"])):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert [problem.id for problem in check_environment(config, machine(H200))] == ids
