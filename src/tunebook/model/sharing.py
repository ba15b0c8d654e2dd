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

from typing import TYPE_CHECKING, Any

from tunebook.facts.sharing import Sharing, sharing_of, stays_whole

if TYPE_CHECKING:
    import torch

__all__ = ["Sharing", "copy_from_first_rank", "sharing_of", "stays_whole"]


def copy_from_first_rank(model: Any, device: torch.device) -> None:
    """Move a model to this rank's device and give it the parameters of rank 0. Tied weights stay tied."""
    import torch

    model.to(device)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
