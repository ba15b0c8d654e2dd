"""Activation offloading that moves activations and not weights.

Autograd keeps a transposed view of a layer's weight for its backward pass. TRL's offloading (1.16) leaves a parameter
where it is, and what lies where one did when it was set up: not the weights that FSDP gathers since, nor those that
DeepSpeed has put elsewhere. It copied each of them to the host in the forward pass, and back in the backward pass, for
which FSDP gathers them all the same. Compiled layers keep the weight itself, which it knows: there it was as fast and
took as much without this (h100x2_offloaded.jsonl).
"""

from __future__ import annotations

import torch
from trl.models.activation_offloading import OffloadActivations


def leave_weights(offloading: OffloadActivations) -> None:
    """From now on leave views of parameters to whoever holds these: no more than without offloading is kept of them."""
    pack = offloading.pack_hook

    def pack_unless_weight(tensor: torch.Tensor) -> int:
        address = _address(tensor) if isinstance(tensor._base, torch.nn.Parameter) else None
        if address is None or address in offloading.param_storages:
            return int(pack(tensor))
        offloading.param_storages.add(address)
        try:
            return int(pack(tensor))
        finally:
            # An activation may lie there once FSDP has let go of the weight.
            offloading.param_storages.remove(address)

    offloading.pack_hook = pack_unless_weight


def _address(tensor: torch.Tensor) -> int | None:
    """Where its numbers are; None of one that is made of others, as torchao's in fp8 is."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None
