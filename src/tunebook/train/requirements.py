"""Refusals before a GPU is touched: what a resolved configuration needs and this machine, environment or image lacks.

They are checked before a run starts, not when it is only planned. If a launcher starts ranks elsewhere (Slurm, Ray),
the ranks check their own machines. In an image the suggested commands are the host's: make, which selects an image by
`GPU=`.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata

from tunebook.config.book import resolve_path
from tunebook.config.choices import Compute, Generation, PackingMode, PeftMethod, TrackerName
from tunebook.config.schema import HardwareConfig, RunConfig, ZeroConfig, starts_elsewhere
from tunebook.errors import Problem, RequestError
from tunebook.facts.attention import ATTENTIONS
from tunebook.facts.generations import (
    GENERATIONS,
    OLDEST_SUPPORTED,
    capability_text,
    driver_major,
    image_for_driver,
)
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import uses_nvme
from tunebook.facts.strategies import strategy_facts
from tunebook.hardware.detect import VISIBLE_VARIABLE, Machine, detect_machine
from tunebook.hardware.image import Image, read_image
from tunebook.model.parameters import known_facts
from tunebook.parallel.deepspeed import nvme_bytes

GIB = 2**30
_KEY = "hardware.generation"
# torch in the registry: up to 2.10 with CUDA 12.8 and code for 7.0, from 2.11 with CUDA 13.0 and code from 7.5.
_FIRST_TORCH_ON_CUDA_13 = (2, 11)
_INSTALL = {  # where it is more than `pip install` and the name
    "deepspeed": "DS_BUILD_OPS=0 pip install deepspeed",  # builds its operators on first use
    "flash-attn": "pip install flash-attn --no-build-isolation",
    "flash-attn-4": "pip install flash-attn-4==4.0.0b36",  # pinned, because we call parts of it that are not public
}
_NOT_IN_THE_REGISTRY = "flash-attn-3"


def check_environment(config: RunConfig, machine: Machine | None = None) -> list[Problem]:
    """Everything that a resolved configuration needs and this machine and environment lack; empty if nothing.

    Detects the machine if none is given.
    """
    if starts_elsewhere(config):
        return []
    machine = machine if machine is not None else detect_machine()
    hardware = hardware_problem(config, machine)
    if hardware is not None:
        return [hardware]  # packages may well be installed on the machine with the GPUs
    image = read_image()
    problems = list(_missing_packages(config, image))
    is_on_cpu = config.hardware.generation is Generation.cpu
    if config.model.compile_layers and machine.missing_for_triton is not None and not is_on_cpu:
        message = f"Triton compiles a launcher for each kernel, and {machine.missing_for_triton}"
        key, fix = "model.compile_layers", "model.compile_layers=false"
        problems.append(Problem(id="compiled-layers-without-compiler", key=key, message=message, fix=fix))
    # An image's torch was checked when it was built. `hardware_problem` checks its GPU and driver.
    if image is None and config.hardware.generation not in (Generation.cpu, Generation.auto):
        problems += torch_problems(config.hardware.generation, machine)
    return [*problems, *_nvme_problems(config)]


# GPUs


def hardware_problem(config: RunConfig, machine: Machine) -> Problem | None:
    """Why the ranks cannot start on this machine's GPUs; None if they can.

    Raises: RequestError if the description of this image is damaged.
    """
    if starts_elsewhere(config):
        return None
    image = read_image()
    in_image = None if image is None else image_problem(config.hardware, config.recipe, machine, image)
    if in_image is not None and not machine.gpus:
        return in_image
    if config.hardware.generation in (Generation.cpu, Generation.auto):
        return None
    return _gpu_problem(config, machine) or in_image


def _gpu_problem(config: RunConfig, machine: Machine) -> Problem | None:
    """The problem if the GPUs found here differ from those that the configuration was resolved for."""
    hardware = config.hardware
    generation, num_gpus = hardware.generation.name, hardware.gpus_per_node or 1
    if not machine.gpus:
        message = f"{num_gpus} x {generation} needed, and no GPU is found here: {_reasons(machine)}"
        fix = "the same where the GPUs are (--dry-run shows here what it does there), or hardware.generation=cpu"
        return Problem(id="no-gpu-here", key=_KEY, message=message, fix=fix)
    used = machine.gpus[:num_gpus]
    generations = sorted({gpu.generation.name for gpu in used})
    if len(generations) > 1:
        message = f"the first {num_gpus} GPUs are of different generations: {', '.join(generations)}"
        fix = f"{VISIBLE_VARIABLE}=ID,ID in front of the command, with the ids of equal GPUs (nvidia-smi -L lists them)"
        return Problem(id="mixed-gpus", key=_KEY, message=message, fix=fix)
    if generations != [generation]:
        message = f"{generation} is set, and this machine has {used[0].name} ({generations[0]})"
        return Problem(id="other-gpu-here", key=_KEY, message=message, fix="hardware.generation=auto")
    if num_gpus > len(machine.gpus):
        message = f"the run needs {num_gpus} GPUs, and this machine has {len(machine.gpus)}"
        fix = f"hardware.gpus_per_node={len(machine.gpus)}"
        return Problem(id="too-few-gpus-here", key="hardware.gpus_per_node", message=message, fix=fix)
    oldest = min(gpu.compute_capability for gpu in used)
    if oldest < OLDEST_SUPPORTED:
        first = capability_text(OLDEST_SUPPORTED)
        message = f"{used[0].name} has compute capability {capability_text(oldest)}; torch starts at {first}"
        return Problem(id="gpu-too-old", key=_KEY, message=message, fix="hardware.generation=cpu")
    return None


def image_problem(hardware: HardwareConfig, recipe: str | None, machine: Machine, image: Image) -> Problem | None:
    """Why a run cannot start in this image: it got no GPU, has no code for the run's GPUs, or needs a newer driver."""
    this = f"this is the {image.generation} image"
    if not machine.gpus and image.is_for_gpus and machine.driver is None:
        message = f"{this}, and no GPU is passed through to it: {_reasons(machine)}"
        fix = (
            f"{_make(recipe)}, which reserves the GPUs (nvidia-smi must list them on the host, and make env there "
            f"says what Docker lacks); on the CPU: {_make(recipe, GENERATIONS[Generation.cpu].image.name)}"
        )
        return Problem(id="no-gpu-in-image", key=_KEY, message=message, fix=fix)
    if not machine.gpus:
        if image.is_for_gpus or hardware.generation in (Generation.cpu, Generation.auto):
            return None
        message = f"{hardware.generation.name} is set, and {this}, which has no code for a GPU"
        right = GENERATIONS[hardware.generation].image.name
        fix = f"{_make(recipe, right)} where the GPUs are, or hardware.generation=cpu"
        return Problem(id="wrong-image", key=_KEY, message=message, fix=fix)
    for gpu in machine.gpus[: hardware.gpus_per_node or 1]:
        fitting = image_for_driver(gpu.generation, machine.driver)
        other = fitting.name if fitting is not None and fitting.name != image.generation else None
        # An attention package only has code for the GPUs of its own image.
        is_own = GENERATIONS[gpu.generation].image.name == image.generation or image.attention is None
        if not (image.is_for_gpus and image.has_code_for(gpu.compute_capability) and is_own):
            served = ", ".join(map(capability_text, image.compute_capabilities)) or "the CPU alone"
            message = f"{gpu.name} has compute capability {capability_text(gpu.compute_capability)}, and {this}, for "
            fix = _make(recipe, other) if other else "another GPU or a newer driver: no image runs on these"
            return Problem(id="wrong-image", key=_KEY, message=message + served, fix=fix)
        major = driver_major(machine.driver) if machine.driver else None
        if image.min_driver is not None and major is not None and major < image.min_driver:
            message = f"driver {machine.driver} is older than the {image.min_driver} that the {image.generation} image"
            update = f"updating the NVIDIA driver to {image.min_driver} or newer"
            fix = f"{_make(recipe, other)}, or {update}" if other else update
            return Problem(id="driver-too-old", key=_KEY, message=f"{message} (CUDA {image.cuda}) needs", fix=fix)
    return None


def refuse_wrong_image() -> None:
    """Refuse to load a trained model in an image that cannot run it; outside of an image nothing is checked.

    The CPU image accepts every model, since it computes on the CPU. Raises: RequestError.
    """
    image = read_image()
    if image is None or not image.is_for_gpus:
        return
    if problem := image_problem(HardwareConfig(gpus_per_node=1), None, detect_machine(), image):
        raise RequestError(f"{problem.message}; try {problem.fix}", problem_id=problem.id)


def _reasons(machine: Machine) -> str:
    return "; ".join(machine.notes) or "none is listed"


def _make(recipe: str | None, image: str | None = None) -> str:
    """The command on the host; `image` is only given if make would select another one."""
    gpu = f" GPU={image}" if image else ""
    return f"make train RECIPE={recipe}{gpu}" if recipe else f"make env{gpu} and the same again"


# Packages


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def missing_state_kernels(config: RunConfig, version_of: Callable[[str], object]) -> list[str]:
    """The packages that a model's layers need for packed rows on this hardware, and that `version_of` does not find."""
    facts = config.model.facts
    if facts is None or facts.measured is None or config.hardware.generation is Generation.cpu:
        return []
    return [package for package in facts.measured.packing_packages if not version_of(package)]


def _needed_packages(config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
    """Each package that a setting needs: its name, the setting's key, and what to type to do without it."""
    if strategy_facts(config).is_zero:
        yield "deepspeed", "parallelism.strategy", None
    if OPTIMIZERS[config.optimizer.name].package == "bitsandbytes":
        yield "bitsandbytes", "optimizer.name", None
    if config.peft.method is PeftMethod.qlora:
        yield "bitsandbytes", "peft.method", None
    if config.peft.method is not PeftMethod.full:
        yield "peft", "peft.method", None
    if config.model.liger_kernel:
        yield "liger-kernel", "model.liger_kernel", None
    if config.precision.compute is Compute.fp8 and config.peft.method is PeftMethod.full:
        yield "torchao", "precision.compute", None
    if config.evaluation.tasks:
        yield "lm_eval", "evaluation.tasks", None
    if config.tracking.name is not TrackerName.none:
        yield config.tracking.name.name, "tracking.name", None
    if config.packing.mode is PackingMode.isolated:
        for package in missing_state_kernels(config, installed_version):
            yield package, "packing.mode", "packing.mode=padded packing.row_length=null"
    attention_package = ATTENTIONS[config.attention.implementation].package
    if attention_package is not None:
        yield attention_package, "attention.implementation", "attention=auto"


def _missing_packages(config: RunConfig, image: Image | None) -> Iterator[Problem]:
    for package, key, instead in _needed_packages(config):
        if installed_version(package) is not None:
            continue
        message = f"the package {package} is not installed in this {'image' if image else 'environment'}"
        if image is None:
            add = _INSTALL.get(package, f"pip install {package}")
        else:
            add = f"add {package} to docker/{image.generation}/requirements.in, then make lock and make image"
        if package == _NOT_IN_THE_REGISTRY or (image is not None and key == "attention.implementation"):
            add = ""
        fix = " or ".join(filter(None, (instead, add)))
        yield Problem(id="missing-package", key=key, message=message, fix=fix)


def torch_problems(generation: Generation, machine: Machine) -> Iterator[Problem]:
    """Report if the installed torch has no code for GPUs of this generation, or does not run on their driver."""
    version = installed_version("torch")
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None or numbers is None:
        return  # a missing torch is reported elsewhere: everything needs it
    is_cuda_13 = (int(numbers[1]), int(numbers[2])) >= _FIRST_TORCH_ON_CUDA_13
    image = image_for_driver(generation, machine.driver)
    fitting = f"the {image.name} image (torch {image.torch})" if image else "no image, before the driver is updated"
    if version.endswith("+cpu"):
        message = f"torch {version} is a CPU build; {generation.name} needs {fitting}"
        yield Problem(id="torch-without-gpu-code", key=_KEY, message=message, fix="hardware.generation=cpu")
        return
    if is_cuda_13 and generation is Generation.volta:
        message = f"torch {version} has no code for compute capability 7.0; volta needs {fitting}"
        yield Problem(id="torch-without-gpu-code", key=_KEY, message=message, fix="pip install torch==2.10.0")
    major = driver_major(machine.driver) if machine.driver else None
    floor = 580 if is_cuda_13 else 525
    if major is not None and major < floor:
        message = f"driver {machine.driver} is older than the {floor} that torch {version} needs; it runs {fitting}"
        fix = "pip install torch==2.10.0" if image and image.torch == "2.10.0" else "update the NVIDIA driver"
        yield Problem(id="driver-too-old", key=_KEY, message=message, fix=fix)


# NVMe


def _nvme_problems(config: RunConfig) -> Iterator[Problem]:
    settings = config.parallelism
    if not (uses_nvme(config) and isinstance(settings, ZeroConfig) and settings.nvme_path):
        return
    folder, facts = resolve_path(settings.nvme_path), known_facts(config)
    if not folder.is_dir():
        message = f"there is no folder {folder} on this machine"
        fix = f"mkdir -p {shlex.quote(str(folder))} or parallelism.nvme_path=FOLDER"
        yield Problem(id="nvme-path-not-found", key="parallelism.nvme_path", message=message, fix=fix)
    elif facts is not None:
        needed = (config.hardware.gpus_per_node or 1) * nvme_bytes(config, facts)
        free = shutil.disk_usage(folder).free
        if needed > free:
            message = f"{free / GIB:,.1f} GiB are free on the disk of {folder}, and the states take {needed / GIB:,.1f}"
            fix = "parallelism.nvme_path=FOLDER on a larger disk, or free some space"
            yield Problem(id="nvme-too-small", key="parallelism.nvme_path", message=message, fix=fix)
