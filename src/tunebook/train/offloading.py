"""Corrections to upstream's offloading of parameters to the host: the output head and the gradient scale.

FSDP gathers a module's weights when the module is called, and TRL's fused head reads the head's weight without calling
it. In full fine-tuning the head is gathered with the last norm, which is called just before. With adapters accelerate
(1.15) does not find that norm: nothing gathers the head, TRL gathers it on the host, and logits and loss of every token
are computed there, except in the first pass, which finds the head as the leak probe has left it.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor


def correct_offloading(trainer: Any) -> None:
    """Apply both corrections to a trainer whose parameters FSDP keeps on the host."""
    if trainer.is_fsdp_enabled and isinstance(trainer.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        gather_head(trainer.model)
        keep_scale_on_host(trainer.accelerator)


def gather_head(model: Any) -> None:
    """Gather the output head on the GPU whenever the layers before it have been computed.

    FSDP releases it after a backward pass, like every unit; after a pass without one, as in validation, it stays until
    the next. A head that is not a unit is left unchanged. `model` is a causal language model with or without
    adapters, before or after FSDP has wrapped it.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()

    def gather(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if isinstance(head, FSDPModule) and isinstance(getattr(head, "weight", None), DTensor):
            head.unshard()

    causal.base_model.register_forward_hook(gather)


def keep_scale_on_host(accelerator: Accelerator) -> None:
    """Keep the loss scale of an FSDP run in fp16 on the host, where its gradients and its optimizer are.

    accelerate (1.15) keeps the scale on the GPU. torch's GradScaler (2.13) and its fused AdamW then copy it to the host
    without waiting for the copy, so the first gradients are divided by uninitialized memory, without any message.
    """
    if accelerator.scaler is not None:
        handler = accelerator.scaler_handler
        accelerator.scaler = GradScaler("cpu", **(handler.to_kwargs() if handler else {}))
