"""What a resolved configuration needs of the machine and environment that its ranks start in.

Asked before a run starts, not when it is only planned. A launcher that starts ranks elsewhere (Slurm, Ray) is not
judged by the machine it is called on: the ranks look for themselves.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Iterator

from tunebook.config.book import resolve_path
from tunebook.config.choices import Generation, LauncherName, Offload
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.errors import Problem
from tunebook.facts.generations import OLDEST_SUPPORTED, capability_text, driver_major, image_for_driver
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.hardware.image import read_image
from tunebook.hardware.visible import equal_gpus, visible_only
from tunebook.plan.memory.host import host_bytes
from tunebook.plan.rules import image as image_rules
from tunebook.plan.rules import packages
from tunebook.plan.rules.frame import Explanation
from tunebook.plan.rules.packages import installed_version

__all__ = [
    "EXPLANATIONS",
    "address_warning",
    "check_environment",
    "hardware_problem",
    "installed_version",
    "starts_elsewhere",
    "torch_problems",
]

# torch on the registry: up to 2.10 CUDA 12.8 with code for 7.0, from 2.11 CUDA 13.0 with code from 7.5.
_FIRST_TORCH_ON_CUDA_13 = (2, 11)
GIB = 2**30


EXPLANATIONS: dict[str, Explanation] = {
    "no-gpu-here": Explanation(
        summary="The run needs GPUs, and none is found here.",
        why="Where no GPU is found, `auto` plans for the machine that the recipe is planned for; that plan cannot "
        "start here. The GPU may also be hidden: no driver, CUDA_VISIBLE_DEVICES, a container without --gpus.",
        advice="Start it where the GPUs are, look with `tunebook doctor`, or take a model that a CPU can train with "
        "hardware.generation=cpu.",
    ),
    "other-gpu-here": Explanation(
        summary="The run is set up for another GPU generation than the one found here.",
        why="A generation decides precision, attention and the image. What was chosen for one may not run on another.",
        advice="Leave hardware.generation at auto, or start it on the machine it was set up for.",
    ),
    "too-few-gpus-here": Explanation(
        summary="More GPUs are asked for than are found here.",
        why="Every rank needs a GPU of its own; two ranks on one GPU run out of memory or wait for each other.",
        advice="Lower hardware.gpus_per_node, or make the other GPUs visible.",
    ),
    "mixed-gpus": Explanation(
        summary="The run would use GPUs of different generations together.",
        why="All ranks must compute in the same precision with the same kernels, and wait for the slowest in every "
        "step; the difference in rounding makes a run impossible to repeat.",
        advice="Restrict the run to one kind with CUDA_VISIBLE_DEVICES, by the ids of nvidia-smi -L: by number CUDA "
        "counts the fastest GPU first, in another order than nvidia-smi.",
    ),
    "gpu-too-old": Explanation(
        summary="The GPU is older than any that torch still has code for.",
        why="The newest torch with the oldest code, 2.10.0, starts at compute capability 7.0 (V100).",
        advice="Use a newer GPU, or hardware.generation=cpu.",
    ),
    "driver-too-old": Explanation(
        summary="The NVIDIA driver is older than the installed torch needs.",
        why="CUDA 12 needs driver 525 or newer, CUDA 13 driver 580 or newer; torch is built on CUDA 13 from 2.11 on.",
        advice="Update the driver, or use the image that the message names: torch 2.10.0 runs on every generation from "
        "driver 525 on.",
    ),
    "torch-without-gpu-code": Explanation(
        summary="The installed torch cannot use the GPU that is here.",
        why="A CPU build has no GPU code at all, and torch on CUDA 13 (2.11 and newer) has none for V100.",
        advice="Run in the image of the generation, or install the build that the message names.",
    ),
    "nvme-too-small": Explanation(
        summary="The disk for NVMe offload has less room than the states need.",
        why="DeepSpeed keeps a file for each state there: 16 bytes of the optimizer's for each trained parameter, and "
        "the weights where they are offloaded too. Where the disk is full the run ends in its first step.",
        advice="Free some space, or name a folder on a larger disk with parallelism.nvme_path.",
    ),
    "nvme-path-not-found": Explanation(
        summary="The folder for NVMe offload does not exist here.",
        why="DeepSpeed would make it wherever the path leads, which may be a small or slow disk.",
        advice="Make the folder on the NVMe disk, or name another with parallelism.nvme_path.",
    ),
    "compiled-layers-without-compiler": Explanation(
        summary="model.compile_layers=true, and this machine lacks what kernels are compiled with.",
        why="For a GPU torch writes kernels in Triton, which compiles a launcher for each with a C compiler and "
        "Python's headers; for a CPU it writes them in C++. The run would end in its first step.",
        advice="Install what the message names, run in the image of the GPU generation, which has it, or leave "
        "model.compile_layers open: then blocks are compiled only where they can be.",
    ),
    "master-address-unknown": Explanation(
        summary="Node 0 does not know the name that the other nodes are to call it by.",
        why="launcher.master_address is how the other nodes reach node 0, which does not call itself by it: a name may "
        "be known to them alone, so the run starts. What node 0 cannot find is most often misspelt, though; the other "
        "nodes would call in vain, and node 0 would wait for launcher.start_timeout_s.",
        advice="Nothing, if the other nodes know the name. Else correct it, type an address of node 0, or leave it out "
        "on node 0: it then says its own name.",
    ),
    **image_rules.EXPLANATIONS,
    **packages.EXPLANATIONS,
}


def starts_elsewhere(config: RunConfig) -> bool:
    """Whether the launcher starts the ranks on other machines than this one."""
    return config.launcher.name is not LauncherName.local


def hardware_problem(config: RunConfig, machine: Machine) -> Problem | None:
    """Why the ranks cannot start on this machine's GPUs, or None where they can.

    Raises: RequestError when this is an image whose description is damaged.
    """
    if starts_elsewhere(config):
        return None
    image = read_image()
    if image is not None and not machine.gpus:
        problem = image_rules.no_gpu_problem(config.hardware, config.recipe, machine, image)
        if problem is not None:
            return problem
    if config.hardware.generation in (Generation.cpu, Generation.auto):
        return None
    problem = _gpu_problem(config, machine)
    if problem is None and image is not None:
        problem = image_rules.gpu_problem(config.hardware, config.recipe, machine, image)
    return problem


def _gpu_problem(config: RunConfig, machine: Machine) -> Problem | None:
    """Where the GPUs found here are not those that the configuration was resolved for."""
    hardware, key = config.hardware, "hardware.generation"
    wanted, asked = hardware.generation.name, max(1, hardware.gpus_per_node or 1)
    if not machine.gpus:
        reasons = "; ".join(machine.notes) or "none is listed"
        message = f"{asked} x {wanted} needed, and no GPU is found here: {reasons}"
        fix = "the same where the GPUs are (--dry-run shows here what it does there), or hardware.generation=cpu"
        return Problem(id="no-gpu-here", key=key, message=message, fix=fix)
    used = machine.gpus[:asked]
    kinds = sorted({gpu.generation.name for gpu in used})
    if len(kinds) > 1:
        same = equal_gpus(machine.gpus)
        message = f"the first {asked} GPUs are of different generations: {', '.join(kinds)}"
        fewer = f", and hardware.gpus_per_node={len(same)}" if len(same) < asked else ""
        fix = f"{visible_only(same)} in front of the command{fewer}"
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
        message = f"{used[0].name} has compute capability {capability_text(oldest)}; torch starts at 7.0"
        return Problem(id="gpu-too-old", key=key, message=message, fix="hardware.generation=cpu")
    return None


def check_environment(config: RunConfig, machine: Machine | None = None) -> list[Problem]:
    """Everything that this machine and environment lack for a resolved configuration; empty when it can start here.

    The machine is looked at when none is given.
    """
    if starts_elsewhere(config):
        return []
    machine = machine if machine is not None else detect_machine()
    hardware = hardware_problem(config, machine)
    if hardware is not None:
        return [hardware]  # packages would be asked for that the machine with the GPUs may well have
    image = read_image()
    problems = [*packages.missing_packages(config, installed_version, image), *_compiler_problems(config, machine)]
    # An image's torch was checked when it was built, and its GPU and driver by `hardware_problem`.
    if image is None and config.hardware.generation not in (Generation.cpu, Generation.auto):
        problems += torch_problems(config.hardware.generation, machine)
    settings = config.parallelism
    if isinstance(settings, ZeroConfig) and Offload.nvme in (settings.offload_optimizer, settings.offload_parameters):
        problems += _nvme_problems(config, settings)
    return problems


def address_warning(config: RunConfig) -> Problem | None:
    """What node 0 of several says where it does not know the name that the others are to call it by, as they may.

    A later node calls for a while: a scheduler may make names known when nodes are up.
    """
    launcher, key = config.launcher, "launcher.master_address"
    if not launcher.master_address or launcher.node_rank > 0 or config.hardware.num_nodes < 2:
        return None
    try:
        socket.getaddrinfo(launcher.master_address, launcher.master_port)
    except (OSError, UnicodeError) as error:
        message = (
            f"node 0 does not find {launcher.master_address} itself ({error}); where the other nodes do not either, "
            "they call in vain"
        )
        return Problem(id="master-address-unknown", key=key, message=message, fix=f"{key}=null", is_error=False)
    return None


def _compiler_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Where blocks are to be compiled that cannot be here. What `auto` decides was decided knowing that."""
    missing, what = machine.missing_for_triton, "Triton compiles a launcher for each kernel"
    if config.hardware.generation is Generation.cpu:
        missing, what = machine.missing_for_cpu_kernels, "torch compiles the blocks' kernels for the CPU"
    if config.model.compile_layers and missing is not None:
        message, fix = f"{what}, and {missing}", "model.compile_layers=false"
        yield Problem(id="compiled-layers-without-compiler", key="model.compile_layers", message=message, fix=fix)


def torch_problems(generation: Generation, machine: Machine) -> Iterator[Problem]:
    """Whether the installed torch has code for the GPUs here, which are of a generation, and runs on their driver."""
    version, key = installed_version("torch"), "hardware.generation"
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None or numbers is None:
        return  # a missing torch is missing for everything and is reported as such
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


def _nvme_problems(config: RunConfig, settings: ZeroConfig) -> Iterator[Problem]:
    if not settings.nvme_path:
        return
    folder, facts = resolve_path(settings.nvme_path), config.model.facts
    if folder.is_dir() and facts is not None:
        needed = host_bytes(config, facts, tensors=0, is_recomputed=True).nvme
        free = shutil.disk_usage(folder).free
        if needed > free:
            message = f"{free / GIB:,.1f} GiB are free on the disk of {folder}, and the states take {needed / GIB:,.1f}"
            fix = "parallelism.nvme_path=FOLDER on a larger disk, or free some space"
            yield Problem(id="nvme-too-small", key="parallelism.nvme_path", message=message, fix=fix)
    if not folder.is_dir():
        message = f"there is no folder {settings.nvme_path} on this machine"
        fix = f"mkdir -p {shlex.quote(settings.nvme_path)} or parallelism.nvme_path=FOLDER"
        yield Problem(id="nvme-path-not-found", key="parallelism.nvme_path", message=message, fix=fix)
