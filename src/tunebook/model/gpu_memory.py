"""Place a loaded model on the GPUs for inference, and recognize out-of-memory errors.

The placement is decided from sizes before anything is moved, so that a model that does not fit is an error message and
not a crash: on one GPU, rounded to fewer bits if necessary, over several GPUs, or on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tunebook.errors import DoesNotFitError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
_HEADROOM = 1.1  # for the cache of keys and values and the activations, relative to the weights
_HEADROOM_GIB = 0.5  # and for the kernels' workspaces
# What accelerate does not know. The driver's own error names neither the size nor the allocator.
_SAID = (
    "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",  # NCCL's, newer and older
)  # fmt: skip


class Placement(NamedTuple):
    """Whether the weights are spread over all GPUs, and whether they are rounded to the compute format."""

    is_spread: bool
    is_rounded: bool


def choose_placement(num_parameters: int, bytes_each: int, rounded_bytes: int, free_gib: Sequence[float]) -> Placement:
    """The first that fits: one GPU, one GPU with rounding, all GPUs, all GPUs with rounding.

    `rounded_bytes` is the size of a parameter in the compute format, in which autocast keeps a copy of the weights.
    Raises: DoesNotFitError with the needed and the free memory.
    """
    as_loaded = bytes_each + (rounded_bytes if rounded_bytes < bytes_each else 0)
    for is_spread, free in ((False, max(free_gib)), (True, sum(free_gib))):
        for is_rounded, size in ((False, as_loaded), (True, min(rounded_bytes, bytes_each))):
            if _needed_gib(num_parameters, size) <= free:
                return Placement(is_spread, is_rounded)
    needed = _needed_gib(num_parameters, min(rounded_bytes, bytes_each))
    raise DoesNotFitError(
        f"the model needs about {needed:.1f} GiB of GPU memory and {sum(free_gib):.1f} GiB are free on "
        f"{len(free_gib)} GPU{'s' if len(free_gib) != 1 else ''}; end what else runs there, use more GPUs, or answer "
        "on the CPU, slowly: put CUDA_VISIBLE_DEVICES= before the command",
        problem_id="model-does-not-fit",
    )


def place_on_gpus(model: PreTrainedModel, compute_dtype: torch.dtype | None) -> tuple[PreTrainedModel, str | None]:
    """Move the model to the GPUs of this process; also returns a note if it was rounded or split."""
    placed: Any = model
    if getattr(model, "quantization_method", None) is not None:  # it was loaded onto the GPU already
        return model, None
    free_gib = [torch.cuda.mem_get_info(number)[0] / GIB for number in range(torch.cuda.device_count())]
    dtype = compute_dtype or model.dtype
    choice = choose_placement(
        sum(p.numel() for p in model.parameters()), model.dtype.itemsize, dtype.itemsize, free_gib
    )
    notes = []
    if choice.is_rounded:
        placed = placed.to(dtype)
        notes.append(f"its weights are rounded to {str(dtype).removeprefix('torch.')}, since they do not fit otherwise")
    if choice.is_spread:
        placed = _spread(placed, free_gib)
        notes.append(f"it is spread over {len(free_gib)} GPUs, since it does not fit into one")
    else:
        placed = placed.to(f"cuda:{free_gib.index(max(free_gib))}")
    return placed, "; ".join(notes) or None


def _spread(model: Any, free_gib: list[float]) -> Any:
    from accelerate import dispatch_model, infer_auto_device_map

    memory: dict[int | str, int | str] = {number: int(free / _HEADROOM * GIB) for number, free in enumerate(free_gib)}
    whole = list(model._no_split_modules or ())
    return dispatch_model(model, infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole))


def _needed_gib(num_parameters: int, bytes_each: int) -> float:
    return num_parameters * bytes_each * _HEADROOM / GIB + _HEADROOM_GIB


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch ran out of GPU or host memory. torch, its libraries and the driver have different errors."""
    from accelerate.utils.memory import should_reduce_batch_size

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or any(said in str(error) for said in _SAID)
