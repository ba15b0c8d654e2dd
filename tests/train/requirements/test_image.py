"""Which GPUs, drivers and recipes an image takes, and what is named instead."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tunebook.config.choices import Attention, Compute, Generation, LauncherName, Switch
from tunebook.config.schema import SlurmConfig
from tunebook.errors import RequestError
from tunebook.facts.generations import GENERATIONS, capability_text
from tunebook.hardware.image import IMAGE_FILE_VARIABLE
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.train import image as image_rules
from tunebook.train.image import refuse_wrong_image
from tunebook.train.requirements import check_environment, hardware_problem

V100, T4 = ("Tesla V100-SXM2-32GB", (7, 0)), ("Tesla T4", (7, 5))
A100, L4 = ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA L4", (8, 9))
H200, B200 = ("NVIDIA H200", (9, 0)), ("NVIDIA B200", (10, 0))
# What the wheels of these versions on the package registry have code for.
FLAGS = {
    "2.10.0": ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    "2.13.0": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
}


@pytest.fixture
def inside(monkeypatch, tmp_path):
    """`inside("ampere")`: as if this ran in that image, with every package installed that it has."""

    def go(generation: str, **other: Any) -> None:
        pins = next(facts.image for facts in GENERATIONS.values() if facts.image.name == generation)
        served = [facts for facts in GENERATIONS.values() if facts.image is pins]
        has_flash = generation not in ("cpu", "volta")
        facts = {
            "generation": generation,
            "torch": pins.torch,
            "cuda": pins.cuda,
            "min_driver": pins.min_driver,
            "compute_capabilities": [capability_text(cc) for one in served for cc in one.compute_capabilities],
            "arch_list": [] if generation == "cpu" else FLAGS[pins.torch],
            "attention": "flash-attn-2" if has_flash else "none",
            "lock_sha256": "1" * 64,
            "sources_sha256": "2" * 64,
            "git_commit": None,
            "git_diff_sha256": None,
            "base_image": "debian:12.12-slim",
        }
        file = tmp_path / "image.json"
        file.write_text(json.dumps(facts | other))
        monkeypatch.setenv(IMAGE_FILE_VARIABLE, str(file))
        installed = {"torch": pins.torch} | ({"flash-attn": "2.8.3"} if has_flash else {})
        for module in ("requirements", "packages"):
            monkeypatch.setattr(f"tunebook.train.{module}.installed_version", installed.get)
        monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", installed.get)

    return go


@pytest.fixture
def problem_of(undecided, machine):
    """The problem of a recipe that leaves everything open, with these GPUs."""

    def find(*gpus, driver="580.65.06", recipe: str | None = "a_recipe", **hardware):
        config = replace(undecided, recipe=recipe, hardware=replace(undecided.hardware, **hardware))
        return resolve_auto(config, machine(*gpus, driver=driver)).problem

    return find


@pytest.mark.parametrize(
    ("image", "gpu"),
    [
        ("volta", V100), ("volta", T4), ("ampere", A100), ("ampere", L4), ("hopper", H200), ("blackwell", B200),
        # torch 2.10.0 has their code, and there is no attention package that would lack it
        ("volta", A100), ("volta", H200), ("volta", B200),
    ],
)  # fmt: skip
def test_images_that_serve_a_gpu(inside, problem_of, image, gpu):
    inside(image)
    assert problem_of(gpu) is None


@pytest.mark.parametrize(
    ("image", "gpu", "right", "lacks"),
    [
        ("ampere", V100, "volta", "whose torch 2.13.0 has no code for it"),
        ("hopper", V100, "volta", "whose torch 2.13.0 has no code for it"),
        ("ampere", H200, "hopper", "whose flash-attn-2 is compiled for 8.0, 8.6, 8.9"),
        ("hopper", A100, "ampere", "whose flash-attn-2 is compiled for 9.0"),
        ("ampere", T4, "volta", "whose flash-attn-2 is compiled for"),
        ("hopper", B200, "blackwell", "whose flash-attn-2 is compiled for 9.0"),
        ("cpu", H200, "hopper", "which is for the CPU alone"),
    ],
)
def test_a_gpu_in_another_generations_image(inside, problem_of, image, gpu, right, lacks):
    inside(image)
    problem = problem_of(gpu)
    assert problem.id == "wrong-image"
    assert problem.message.startswith(f"{gpu[0]} has compute capability {capability_text(gpu[1])}, and this is the")
    assert f"the {image} image, {lacks}" in problem.message
    assert f"it needs the {right} image" in problem.message
    assert problem.fix == f"make train RECIPE=a_recipe GPU={right}"


def test_without_a_recipe_the_image_is_picked_by_make_env(inside, problem_of):
    inside("ampere")
    assert problem_of(V100, recipe=None).fix == "make env GPU=volta and the same again"


def test_an_old_driver_decides_which_image_is_the_right_one(inside, problem_of):
    inside("hopper")
    assert problem_of(A100, driver="535.104.05").fix == "make train RECIPE=a_recipe GPU=volta"
    assert problem_of(A100, driver="470.82.01").fix.startswith("updating the NVIDIA driver")


def test_a_gpu_that_no_image_has_code_for(inside, problem_of):
    inside("blackwell")
    problem = problem_of(("NVIDIA Thor", (11, 0)))
    assert problem.id == "wrong-image"
    assert problem.fix == "another GPU: no image has code for this one yet"


@pytest.mark.parametrize(
    ("driver", "said", "fix"),
    [
        ("535.104.05", "the volta image (torch 2.10.0) runs on it", "make train RECIPE=a_recipe GPU=volta, or update"),
        (
            "470.82.01",
            "older than the 580 that the ampere image",
            "updating the NVIDIA driver to 580 or newer; no image",
        ),
    ],
)
def test_a_driver_that_is_older_than_the_images_floor(inside, problem_of, driver, said, fix):
    inside("ampere")
    problem = problem_of(A100, driver=driver)
    assert problem.id == "driver-too-old"
    assert said in problem.message
    assert problem.fix.startswith(fix)
    inside("volta")
    assert (problem_of(A100, driver=driver) is None) is (driver == "535.104.05")


@pytest.mark.parametrize("reference", [Generation.hopper, Generation.cpu])
def test_an_image_for_gpus_without_any(inside, problem_of, undecided, reference):
    inside("hopper")
    problem = problem_of(reference=replace(undecided.hardware.reference, generation=reference))
    assert problem.id == "no-gpu-in-image"
    assert problem.message == (
        "this is the hopper image, and no GPU is passed through to it: no NVIDIA driver answers here"
    )
    for part in ("make train RECIPE=a_recipe or docker compose run", "nvidia-smi", "make env"):
        assert part in problem.fix
    assert problem.fix.endswith("On the CPU: make train RECIPE=a_recipe GPU=cpu")


def test_gpus_that_are_passed_through_but_hidden_are_not_said_to_be_missing(inside, undecided, machine):
    inside("hopper")
    hidden = replace(machine(), driver="580.65.06", notes=["CUDA_VISIBLE_DEVICES='' leaves 0 of 8 GPUs visible"])
    config = replace(undecided, hardware=replace(undecided.hardware, generation=Generation.hopper, gpus_per_node=8))
    problem = hardware_problem(config, hidden)
    assert problem.id == "no-gpu-here"
    assert "leaves 0 of 8 GPUs visible" in problem.message
    config.hardware.generation = Generation.cpu
    assert hardware_problem(config, hidden) is None


def test_a_recipe_for_gpus_in_the_cpu_image(inside, problem_of):
    inside("cpu")
    problem = problem_of(generation=Generation.turing, gpus_per_node=8)
    assert problem.id == "wrong-image"
    assert problem.message == "8 x turing needed, and this is the cpu image, which has no code for a GPU"
    assert problem.fix.startswith("make train RECIPE=a_recipe GPU=volta where the GPUs are")
    assert problem_of(generation=Generation.cpu) is None
    assert problem_of(H200, generation=Generation.cpu) is None  # as asked


def test_a_launcher_that_starts_elsewhere_may_be_called_from_any_image(inside, undecided, machine):
    inside("cpu")
    config = replace(undecided, launcher=SlurmConfig(name=LauncherName.slurm))
    config.hardware.generation = Generation.hopper
    assert hardware_problem(config, machine()) is None


def test_auto_says_which_image_has_flash_attention(inside, undecided, machine):
    inside("volta")
    undecided.model.compile_layers = False
    resolution = resolve_auto(undecided, machine(A100, driver="535.104.05"))
    (choice,) = [choice for choice in resolution.choices if choice.key == "attention.implementation"]
    assert choice.value == "varlen_attention"
    assert choice.why.endswith("the package flash-attn is not installed here; the ampere image has it")
    assert check_environment(resolution.config, machine(A100, driver="535.104.05")) == []


def test_what_an_image_lacks_is_not_installed_with_pip(inside, sound, machine):
    config = replace(sound, recipe="a_recipe")
    inside("volta")
    (problem,) = check_environment(config, machine(H200))
    assert problem.fix == "attention=auto"
    inside("hopper")
    config.precision.compute = Compute.fp8
    config.attention.implementation = Attention.flash_attention_4
    fp8, flash = check_environment(config, machine(H200))
    assert fp8.fix == "add torchao to docker/hopper/requirements.in, then make lock and make image"
    assert flash.fix == "attention=auto"


def test_the_volta_image_needs_no_look_at_torch(inside, sound, machine):
    inside("volta")
    sound.hardware.generation = Generation.volta
    sound.precision = replace(sound.precision, compute=Compute.fp32, tf32=Switch.disabled)
    sound.attention.implementation = Attention.sdpa
    assert check_environment(sound, machine(V100, driver="525.60.13")) == []


def test_a_damaged_image_is_refused_before_anything_starts(undecided, machine, monkeypatch, tmp_path):
    monkeypatch.setenv(IMAGE_FILE_VARIABLE, str(tmp_path / "image.json"))
    with pytest.raises(RequestError, match="make image"):
        hardware_problem(undecided, machine(H200))


def test_a_trained_model_is_not_loaded_in_an_image_that_cannot_run_it(inside, machine, monkeypatch):
    def with_gpus(*gpus):
        monkeypatch.setattr(image_rules, "detect_machine", lambda: machine(*gpus))

    with_gpus()
    refuse_wrong_image()  # outside of an image
    inside("hopper")
    with pytest.raises(RequestError, match="no GPU is passed through") as caught:
        refuse_wrong_image()
    assert caught.value.message.endswith("On the CPU: make env GPU=cpu and the same again")
    with_gpus(V100)
    with pytest.raises(RequestError, match="try make env GPU=volta and the same again"):
        refuse_wrong_image()
    with_gpus(H200)
    refuse_wrong_image()
    inside("cpu")
    with_gpus()
    refuse_wrong_image()  # a model that GPUs have trained may be looked at on a laptop
