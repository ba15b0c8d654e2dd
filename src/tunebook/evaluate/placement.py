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
from tunebook.errors import DoesNotFitError, RequestError, counted
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
    """Choose the GPUs of a run's model, by default with a copy on each. Raises: as `choose_placement`."""
    gpus = detect_machine().gpus if config.hardware.generation is not Generation.cpu else []
    return choose_placement(loaded_gib(config, folder) if gpus else None, gpus, num_processes)


def choose_placement(weights_gib: float | None, gpus: Sequence[Gpu], asked: int | None = None) -> Placement:
    """Choose a copy on each GPU if it fits into the smallest, else one model over all; on a CPU one process.

    `asked` overrides the number of processes. Raises: DoesNotFitError for a model larger than all GPUs together,
    RequestError for more processes than GPUs.
    """
    if not gpus:
        count = asked or 1
        return Placement(text=f"on the CPU, {counted(count, 'process', 'processes')}", num_processes=count)
    if asked is not None and asked > len(gpus):
        raise RequestError(
            f"--processes {asked}: there are {len(gpus)} GPUs visible here, and each process needs its own; "
            f"type --processes {len(gpus)} or fewer",
            problem_id="more-processes-than-gpus",
        )
    needed = 0.0 if weights_gib is None else weights_gib * _HEADROOM + _HEADROOM_GIB
    smallest, everything = min(gpu.memory_gib for gpu in gpus), sum(gpu.memory_gib for gpu in gpus)
    if needed <= smallest:
        count = asked or len(gpus)
        how = "one GPU" if count == 1 else f"{count} GPUs, a copy of the model on each"
        return Placement(text=f"on {how}", num_processes=count)
    if needed > everything:
        raise DoesNotFitError(
            f"the model's weights take {weights_gib:.1f} GiB, with working memory {needed:.1f} GiB, and the "
            f"{counted(len(gpus), 'GPU')} visible here have {everything:.1f} GiB; use more or larger GPUs, "
            "or evaluate on the CPU, slowly: put CUDA_VISIBLE_DEVICES= before the command",
            problem_id="model-does-not-fit",
        )
    return Placement(
        text=f"one model over {len(gpus)} GPUs: its weights take {weights_gib:.1f} GiB, which does not fit into one of "
        f"{smallest:.1f} GiB",
        is_sharded=True,
    )


def loaded_gib(config: RunConfig, folder: Path | None) -> float | None:
    """Return the memory of a run's loaded weights in GiB, from the headers of their files.

    None without files (random weights) and if loading quantizes the weights (QLoRA).
    """
    if config.peft.method is PeftMethod.qlora:
        return None
    if folder is None or is_adapter(folder):
        if config.model.weights is Weights.random:
            return None
        folder = weights_folder(config.model)
    files = find_weight_files(folder)
    bytes_each = 2 if config.precision.master_weights is MasterWeights.bf16 else 4
    if all(file.suffix == ".safetensors" for file in files):
        return sum(math.prod(shape) for shape in read_shapes(files).values()) * bytes_each / GIB
    return sum(file.stat().st_size for file in files) * bytes_each / 2 / GIB  # pickles: assume two bytes per value
