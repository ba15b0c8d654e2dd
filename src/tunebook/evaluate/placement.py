"""GPUs of an evaluation: a model copy on each, or one model over all of them if one GPU is too small.

Chosen before torch is imported, from the headers of the weight files and the driver's list of visible GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunebook.config.choices import Generation, MasterWeights, PeftMethod, Weights
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError, counted
from tunebook.hardware.detect import GIB, Gpu, detect_machine
from tunebook.model.adapters import is_adapter
from tunebook.model.load import weights_folder
from tunebook.model.weight_files import find_weight_files, read_shapes

_HEADROOM = 1.15  # activations, KV cache and logits of a small batch, in addition to the weights
_HEADROOM_GIB = 1.0  # libraries and kernel workspaces


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of the model."""

    text: str  # for the user and the record
    num_processes: int = 1
    is_sharded: bool = False  # one model over all GPUs


ONE_PROCESS = Placement(text="in this process, on the device that torch finds")


def place(config: RunConfig, folder: Path | None, num_processes: int | None) -> Placement:
    """Choose the GPUs of a run's model, by default with a copy on each. Raises: RequestError."""
    gpus = detect_machine().gpus if config.hardware.generation is not Generation.cpu else []
    return choose_placement(loaded_gib(config, folder) if gpus else 0.0, gpus, num_processes)


def choose_placement(weights_gib: float, gpus: Sequence[Gpu], requested: int | None = None) -> Placement:
    """Choose a copy on each GPU if it fits into the smallest, else one model over all; on a CPU one process.

    `requested` overrides the number of processes. Raises: RequestError for more processes than GPUs.
    """
    if not gpus:
        count = requested or 1
        return Placement(text=f"on the CPU, {counted(count, 'process', 'processes')}", num_processes=count)
    if requested is not None and requested > len(gpus):
        raise RequestError(
            f"--processes {requested}: each process needs a GPU, and {len(gpus)} are visible here",
            problem_id="more-processes-than-gpus",
        )
    if weights_gib * _HEADROOM + _HEADROOM_GIB > min(gpu.memory_gib for gpu in gpus):
        return Placement(text=f"one model over {len(gpus)} GPUs: one is too small for it", is_sharded=True)
    count = requested or len(gpus)
    return Placement(text=f"on {counted(count, 'GPU')}, a copy of the model on each", num_processes=count)


def loaded_gib(config: RunConfig, folder: Path | None) -> float:
    """Return the memory of a run's loaded weights in GiB, from the headers of their files.

    0 without files (random weights) and if loading quantizes the weights (QLoRA): they are taken to fit.
    """
    if folder is None or is_adapter(folder):
        if config.model.weights is Weights.random or config.peft.method is PeftMethod.qlora:
            return 0.0
        folder = weights_folder(config.model)
    count = sum(math.prod(shape) for shape in read_shapes(find_weight_files(folder)).values())
    return count * (2 if config.precision.master_weights is MasterWeights.bf16 else 4) / GIB
