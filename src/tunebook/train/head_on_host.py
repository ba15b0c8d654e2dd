"""The output head that FSDP keeps on the host, gathered on the GPU when the fused head is to compute with it.

FSDP gathers a module's weights when the module is called, and TRL's fused head reads the head's weight without calling
it. In a full fine-tuning the head shares its gathering with the last norm, which is called just before. Around a model
with adapters accelerate (1.15) does not find that norm: the head is gathered by nobody, TRL gathers it where it lies,
and logits and loss of every token are computed on the host. What had been gathered by the leak probe was still there
in the first pass, so from the second on the numbers came from another device, and could not be added to the first's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def gather_before_use(model: Any) -> None:
    """From now on gather the head when the layers before it have been computed; FSDP lets go of it after a backward
    pass, as of every other unit. Behind a pass without one, as in validation, it stays until the next.

    A head without a unit of its own, which is gathered with others, stays as it is. `model` is a causal language model,
    adapters around it or not, that FSDP has wrapped or will wrap.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()

    def gather(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if isinstance(head, FSDPModule) and isinstance(getattr(head, "weight", None), DTensor):
            head.unshard()

    causal.base_model.register_forward_hook(gather)
