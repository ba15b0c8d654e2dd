"""Check whether the current container image can start a run on the GPUs that it finds.

Outside of an image nothing is checked. The suggested commands are those for the host: make, which selects an image by
`GPU=`.
"""

from __future__ import annotations

from tunebook.config.choices import Generation
from tunebook.config.schema import HardwareConfig
from tunebook.errors import Problem, RequestError
from tunebook.facts.generations import GENERATIONS, capability_text, driver_major, image_for_driver
from tunebook.hardware.detect import Gpu, Machine, detect_machine
from tunebook.hardware.image import Image, read_image

_KEY = "hardware.generation"
_CPU = GENERATIONS[Generation.cpu].image.name


def image_problem(hardware: HardwareConfig, recipe: str | None, machine: Machine, image: Image) -> Problem | None:
    """Why a run cannot start in this image: it got no GPU, has no code for the run's GPUs, or needs a newer driver."""
    find = _gpu_problem if machine.gpus else _no_gpu_problem
    return find(hardware, recipe, machine, image)


def _no_gpu_problem(hardware: HardwareConfig, recipe: str | None, machine: Machine, image: Image) -> Problem | None:
    """The problem if no GPU is found: a GPU image got none, or a run for GPUs is in the CPU image."""
    reasons = "; ".join(machine.notes) or "none is listed"
    again = train_line(recipe) if recipe else "make"
    if not image.is_for_gpus and hardware.generation not in (Generation.cpu, Generation.auto):
        wanted = GENERATIONS[hardware.generation].image.name
        message = (
            f"{hardware.gpus_per_node or 1} x {hardware.generation.name} needed, and this is the "
            f"{image.generation} image, which has no code for a GPU"
        )
        fix = f"{train_line(recipe, wanted)} where the GPUs are, or hardware.generation=cpu"
        return Problem(id="wrong-image", key=_KEY, message=message, fix=fix)
    if image.is_for_gpus and machine.driver is None:
        message = f"this is the {image.generation} image, and no GPU is passed through to it: {reasons}"
        fix = (
            f"starting it by {again} or docker compose run, which reserve the GPUs; if that was done, nvidia-smi must "
            "list them on the host, and make env there says what Docker lacks. On the CPU: "
            f"{train_line(recipe, _CPU)}"
        )
        return Problem(id="no-gpu-in-image", key=_KEY, message=message, fix=fix)
    return None


def _gpu_problem(hardware: HardwareConfig, recipe: str | None, machine: Machine, image: Image) -> Problem | None:
    """Why the GPUs of the run cannot be used in this image: it has no code for them, or the driver is too old."""
    for gpu in machine.gpus[: hardware.gpus_per_node or 1]:
        if not _serves(image, gpu):
            return _wrong_image(gpu, image, machine.driver, recipe)
    major = driver_major(machine.driver) if machine.driver else None
    if image.min_driver is None or major is None or major >= image.min_driver:
        return None
    message = (
        f"driver {machine.driver} is older than the {image.min_driver} that the {image.generation} image (CUDA "
        f"{image.cuda}) needs"
    )
    fitting = image_for_driver(machine.gpus[0].generation, machine.driver)
    if fitting is None:
        fix = f"updating the NVIDIA driver to {image.min_driver} or newer; no image runs on {machine.driver}"
    else:
        message += f"; the {fitting.name} image (torch {fitting.torch}) runs on it"
        fix = f"{train_line(recipe, fitting.name)}, or update the NVIDIA driver"
    return Problem(id="driver-too-old", key=_KEY, message=message, fix=fix)


def refuse_wrong_image() -> None:
    """Refuse to load a trained model in an image that cannot run it; outside of an image nothing is checked.

    The CPU image accepts every model, since it computes on the CPU. Raises: RequestError.
    """
    image = read_image()
    if image is None or not image.is_for_gpus:
        return
    if problem := image_problem(HardwareConfig(gpus_per_node=1), None, detect_machine(), image):
        raise RequestError(f"{problem.message}; try {problem.fix}", problem_id=problem.id)


def train_line(recipe: str | None, image: str | None = None) -> str:
    """The command on the host to train a recipe; `image` is only given if make would select another one."""
    gpu = f" GPU={image}" if image else ""
    return f"make train RECIPE={recipe}{gpu}" if recipe else f"make env{gpu} and the same again"


def _serves(image: Image, gpu: Gpu) -> bool:
    """Whether everything in the image runs on a GPU; an attention package only runs on its own image's GPUs."""
    is_own = GENERATIONS[gpu.generation].image.name == image.generation
    return image.is_for_gpus and image.has_code_for(gpu.compute_capability) and (is_own or image.attention is None)


def _wrong_image(gpu: Gpu, image: Image, driver: str | None, recipe: str | None) -> Problem:
    capability = capability_text(gpu.compute_capability)
    made_for = ", ".join(map(capability_text, image.compute_capabilities)) or "no GPU"
    if image.has_code_for(gpu.compute_capability) and image.attention is not None:
        lacks = f"whose {image.attention} is compiled for {made_for}"
    else:
        lacks = f"whose torch {image.torch} has no code for it" if image.is_for_gpus else "which is for the CPU alone"
    message = f"{gpu.name} has compute capability {capability}, and this is the {image.generation} image, {lacks}"
    fitting = image_for_driver(gpu.generation, driver)
    if fitting is None:
        fix = "updating the NVIDIA driver: no image runs on this one"
    elif fitting.name == image.generation:  # the GPU is newer than this version of Tunebook
        fix = "another GPU: no image has code for this one yet"
    else:
        message += f"; it needs the {fitting.name} image (torch {fitting.torch})"
        fix = train_line(recipe, fitting.name)
    return Problem(id="wrong-image", key=_KEY, message=message, fix=fix)
