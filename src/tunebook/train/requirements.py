"""The requirements of a resolved configuration for the machine and environment in which its ranks start.

They are checked before a run starts, not when it is only planned. If a launcher starts ranks elsewhere (Slurm, Ray),
the ranks check their own machines.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator

from tunebook.config.book import resolve_path
from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig, ZeroConfig, starts_elsewhere
from tunebook.errors import Problem
from tunebook.facts.generations import OLDEST_SUPPORTED, capability_text, driver_major, image_for_driver
from tunebook.facts.sharing import uses_nvme
from tunebook.hardware.detect import VISIBLE_VARIABLE, Machine, detect_machine
from tunebook.hardware.image import read_image
from tunebook.model.parameters import known_facts
from tunebook.parallel.deepspeed import nvme_bytes
from tunebook.train.image import image_problem
from tunebook.train.packages import installed_version, missing_packages

# torch in the registry: up to 2.10 with CUDA 12.8 and code for 7.0, from 2.11 with CUDA 13.0 and code from 7.5.
_FIRST_TORCH_ON_CUDA_13 = (2, 11)
GIB = 2**30


def hardware_problem(config: RunConfig, machine: Machine) -> Problem | None:
    """Why the ranks cannot start on this machine's GPUs; None if they can.

    Raises: RequestError if the description of this image is damaged.
    """
    if starts_elsewhere(config):
        return None
    image = read_image()
    if image is not None and not machine.gpus:
        problem = image_problem(config.hardware, config.recipe, machine, image)
        if problem is not None:
            return problem
    if config.hardware.generation in (Generation.cpu, Generation.auto):
        return None
    problem = _gpu_problem(config, machine)
    if problem is None and image is not None:
        problem = image_problem(config.hardware, config.recipe, machine, image)
    return problem


def _gpu_problem(config: RunConfig, machine: Machine) -> Problem | None:
    """The problem if the GPUs found here differ from those that the configuration was resolved for."""
    hardware, key = config.hardware, "hardware.generation"
    wanted, asked = hardware.generation.name, hardware.gpus_per_node or 1
    if not machine.gpus:
        reasons = "; ".join(machine.notes) or "none is listed"
        message = f"{asked} x {wanted} needed, and no GPU is found here: {reasons}"
        fix = "the same where the GPUs are (--dry-run shows here what it does there), or hardware.generation=cpu"
        return Problem(id="no-gpu-here", key=key, message=message, fix=fix)
    used = machine.gpus[:asked]
    kinds = sorted({gpu.generation.name for gpu in used})
    if len(kinds) > 1:
        message = f"the first {asked} GPUs are of different generations: {', '.join(kinds)}"
        fix = f"{VISIBLE_VARIABLE}=ID,ID in front of the command, with the ids of equal GPUs (nvidia-smi -L lists them)"
        return Problem(id="mixed-gpus", key=key, message=message, fix=fix)
    if kinds != [wanted]:
        message = f"{wanted} is set, and this machine has {used[0].name} ({kinds[0]})"
        return Problem(id="other-gpu-here", key=key, message=message, fix="hardware.generation=auto")
    if asked > len(machine.gpus):
        message = f"{asked} GPUs are asked for, and {len(machine.gpus)} are found here"
        fix = f"hardware.gpus_per_node={len(machine.gpus)}"
        return Problem(id="too-few-gpus-here", key="hardware.gpus_per_node", message=message, fix=fix)
    oldest = min(gpu.compute_capability for gpu in used)
    if oldest < OLDEST_SUPPORTED:
        first = capability_text(OLDEST_SUPPORTED)
        message = f"{used[0].name} has compute capability {capability_text(oldest)}; torch starts at {first}"
        return Problem(id="gpu-too-old", key=key, message=message, fix="hardware.generation=cpu")
    return None


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
    problems = [*missing_packages(config, installed_version, image), *_compiler_problems(config, machine)]
    # An image's torch was checked when it was built. `hardware_problem` checks its GPU and driver.
    if image is None and config.hardware.generation not in (Generation.cpu, Generation.auto):
        problems += torch_problems(config.hardware.generation, machine)
    return [*problems, *_nvme_problems(config)]


def _compiler_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Report if blocks must be compiled and cannot be here. `auto` has taken this into account already."""
    missing = None if config.hardware.generation is Generation.cpu else machine.missing_for_triton
    if config.model.compile_layers and missing is not None:
        message = f"Triton compiles a launcher for each kernel, and {missing}"
        yield Problem(
            id="compiled-layers-without-compiler",
            key="model.compile_layers",
            message=message,
            fix="model.compile_layers=false",
        )


def torch_problems(generation: Generation, machine: Machine) -> Iterator[Problem]:
    """Report if the installed torch has no code for GPUs of this generation, or does not run on their driver."""
    version, key = installed_version("torch"), "hardware.generation"
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None or numbers is None:
        return  # a missing torch is reported elsewhere: everything needs it
    is_cuda_13 = (int(numbers[1]), int(numbers[2])) >= _FIRST_TORCH_ON_CUDA_13
    image = image_for_driver(generation, machine.driver)
    fitting = f"the {image.name} image (torch {image.torch})" if image else "no image, before the driver is updated"
    if version.endswith("+cpu"):
        message = f"torch {version} is a CPU build; {generation.name} needs {fitting}"
        yield Problem(id="torch-without-gpu-code", key=key, message=message, fix="hardware.generation=cpu")
    elif is_cuda_13 and generation is Generation.volta:
        message = f"torch {version} has no code for compute capability 7.0; volta needs {fitting}"
        yield Problem(id="torch-without-gpu-code", key=key, message=message, fix="pip install torch==2.10.0")
    major = driver_major(machine.driver) if machine.driver else None
    floor = 580 if is_cuda_13 else 525
    if major is not None and major < floor and not version.endswith("+cpu"):
        message = f"driver {machine.driver} is older than the {floor} that torch {version} needs; it runs {fitting}"
        fix = "pip install torch==2.10.0" if image and image.torch == "2.10.0" else "update the NVIDIA driver"
        yield Problem(id="driver-too-old", key=key, message=message, fix=fix)


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
