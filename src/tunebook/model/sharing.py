"""Who reads the weights, and what the other ranks start from, so that a host holds one copy and not one per GPU.

Three ways, by what the strategy does with the weights afterwards:

- `scatter`, ZeRO-3: each rank builds its own shards (`deepspeed.zero.Init`), rank 0 fills them layer by layer.
- `send`, FSDP2: rank 0 holds the model, the others hold room for it that no page of memory stands behind, until
  accelerate cuts all of them and sends rank 0's values. transformers' own loading reads all the weights on every rank
  here, although it is asked not to (5.23: `_load_pretrained_model` never asks which rank it is on). The room has to be
  there: accelerate finds a parameter of the optimizer by its address (`Accelerator._prepare_fsdp2`, 1.15), and on the
  meta device all have the same.
- `each`, the others: every rank keeps all weights, so every rank reads them, on GPUs from the file straight into the
  GPU's memory. Random ones are drawn by rank 0 and copied.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Compute, MixedPrecision, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.parallel.fsdp import is_fsdp

if TYPE_CHECKING:
    import torch


class Sharing(Enum):
    """How the ranks come to their weights."""

    each = "each"
    send = "send"
    scatter = "scatter"


def sharing_of(config: RunConfig) -> Sharing:
    """The way of a run. Weights that are quantised while they are read are read by each rank, whatever the strategy."""
    settings = config.parallelism
    if config.peft.method is PeftMethod.qlora:
        return Sharing.each
    if settings.strategy is Strategy.zero3:
        return Sharing.scatter
    if isinstance(settings, FsdpConfig) and is_fsdp(settings.strategy) and settings.cpu_ram_efficient_loading:
        return Sharing.send
    return Sharing.each


def stays_whole(config: RunConfig) -> bool:
    """Whether a rank trains with the whole model on its GPU, in the format that it is loaded in.

    Such a model is read straight into the GPU, or drawn by rank 0 and copied from GPU to GPU: no host memory for it.
    Not where DeepSpeed casts the model before it moves it, because the GPU would hold it in fp32 first.
    """
    settings, compute = config.parallelism, config.precision.compute
    if isinstance(settings, ZeroConfig):
        casts = compute is Compute.fp16 or settings.mixed_precision is MixedPrecision.cast
        return settings.strategy is not Strategy.zero3 and not casts
    return settings.strategy in (Strategy.single, Strategy.ddp)


def copy_from_first_rank(model: Any, device: torch.device) -> None:
    """Move a model to this rank's device and give it the parameters of rank 0. Tied weights stay tied."""
    import torch

    model.to(device)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
