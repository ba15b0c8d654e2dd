"""Put a loaded model where it is evaluated, and let it compute fast where the memory allows.

Imports torch, so it is only imported once a model is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from tunebook.errors import DoesNotFitError
from tunebook.model.out_of_memory import is_out_of_memory

GIB = 2**30
SHARE_FOR_COPIES = 0.5  # of what is free once the weights are there; the rest is for a batch of requests
SHARE_FOR_COPIES_OF_ONE = 0.9  # where it is one conversation, as `model.placement` counted


def load_on_gpu(load: Callable[[torch.device], Any]) -> Any:
    """What `load` reads onto this process' GPU, or loads elsewhere to be moved there.

    Raises: DoesNotFitError where what is free there is not enough.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        model = load(device)
        is_there = all(parameter.device == device for parameter in model.parameters())
        return model if is_there else model.to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free, whole = torch.cuda.mem_get_info(device)
        others = whole - free - torch.cuda.memory_reserved(device)
        raise DoesNotFitError(
            f"the model's weights do not fit into a GPU of {whole / GIB:.1f} GiB, {others / GIB:.1f} GiB of which are "
            "not to be had; end what else runs there (nvidia-smi lists it), or leave that GPU out by "
            "CUDA_VISIBLE_DEVICES",
            problem_id="model-does-not-fit",
        ) from error


def refuse_offloading(model: Any) -> None:
    """Refuse a model of which a part was left on the host, from where each batch would fetch it again."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if places & {"cpu", "disk"}:
        raise DoesNotFitError(
            "the GPUs to be seen here have too little free memory for the model: parts of it would stay on the host; "
            "end what else runs there (nvidia-smi lists it), or use more GPUs",
            problem_id="model-does-not-fit",
        )


def choose_copies(model: Any, compute_dtype: torch.dtype | None, share_of_free: float = SHARE_FOR_COPIES) -> str | None:
    """Whether autocast keeps the weights that it converts until a batch is done; a sentence where it cannot.

    torch keeps them only of weights that require a gradient (`cached_cast` in aten/src/ATen/autocast_mode.cpp), also
    where none is computed. Kept, they take half as much again as fp32 weights do; not kept, each product converts its
    weights anew, which a generated token pays for in full. A merged adapter's base requires none, so this is said here.
    """
    if compute_dtype is None:
        return None
    sizes: defaultdict[torch.device, int] = defaultdict(int)
    converted = [parameter for parameter in model.parameters() if parameter.dtype is torch.float32]
    for parameter in converted:
        sizes[parameter.device] += parameter.numel() * compute_dtype.itemsize
    is_kept = all(size <= share_of_free * _free_bytes(device) for device, size in sizes.items())
    for parameter in converted:
        parameter.requires_grad_(is_kept)
    if is_kept:
        return None
    name = str(compute_dtype).removeprefix("torch.")
    return (
        f"{sum(sizes.values()) / GIB:.1f} GiB for its weights in {name} are not to be had beside it, so each product "
        "converts its own: slower, with the same results"
    )


def _free_bytes(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")
