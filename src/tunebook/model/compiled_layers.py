"""Each transformer block compiled by itself: its norms, activations, casts and sums become a few kernels.

All blocks share one compilation, where the whole model would take minutes. What is hooked to a block, as by FSDP, stays
outside, since only its `forward` is replaced; transformers has put the recomputing of activations inside that. How long
a pass is stays open, so rows of another length compile nothing again.

What a compiled block keeps for the backward pass torch decides: whatever costs time to have again, be it only that it
has to be written to memory once more. Where that is not kept (`recomputes`) norms and activation functions are computed
twice, and products, attention and the like still once: what is called selective activation checkpointing.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError
from tunebook.model.blocks import transformer_blocks

if TYPE_CHECKING:
    from torch import nn

# What of a block's inputs stays open: all that is handed to its forward pass, and nothing that hangs on the block
# itself. `dynamic=True` leaves that open too where FSDP has wrapped the block, whose numbers torch does not take for
# constants then (2.11 and 2.13): with a head's size unknown to the compiler, rotating the positions took 178 ms of a
# step of 3.1 s of Llama 3 8B on each of four H200; without that a step was 2.4% faster (h200x4_speed.jsonl and
# h200x4_beside_peers.jsonl). What a user has set there, as by TORCH_COMPILE_DYNAMIC_SOURCES, is replaced.
_OPEN = r"L\['(?!self'\]).*"  # a pattern of the names that torch gives to local variables, and of what is in them


# torch's reasons for keeping what could be computed again, by their names in its configuration (2.11 and 2.13): that
# the backward pass has to write it to memory for a product, that it is needed long after it was computed, and that it
# hangs on a long chain. What is left are operations that are more than arithmetic on single numbers.
_REASONS_TO_KEEP = (
    "ban_recompute_materialized_backward",
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
)


def compile_layers(model: nn.Module, *, recomputes: bool = False, backend: str = "inductor") -> int:
    """Compile the forward pass of every transformer block, when it is first run; how many there are.

    `recomputes`: what costs little is computed again in the backward pass and not kept for it.

    A block stays one graph under DDP too. torch would cut graphs where DDP's buckets end, so that gradients are sent
    while the rest of a graph runs, which blocks by themselves allow already; pieces of blocks kept 8 GiB more of
    Qwen2.5-3B's activations and were slower (2 H200, rows of 8,192 tokens: h200_speed_spread.jsonl).
    Raises: RequestError where transformers does not say which of the model's classes are its blocks.
    """
    import torch
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    blocks: list[Any] = list(transformer_blocks(model).values())
    if not blocks:
        raise RequestError(
            f"model.compile_layers=true: transformers does not say which parts of {type(model).__name__} are its "
            "blocks; try model.compile_layers=false",
            problem_id="no-layers-to-compile",
        )
    dynamo.optimize_ddp = False
    torch.compiler.config.dynamic_sources = _OPEN
    for reason in _REASONS_TO_KEEP:
        setattr(functorch, reason, not recomputes)
    for block in blocks:
        own = vars(block).get("forward")  # where something has put another in its place
        block.forward = torch.compile(own or MethodType(_forward, block), backend=backend)
    return len(blocks)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A block's forward pass, by the class that it has when it is called.

    FSDP gives a block another class later, and transformers recomputes activations in the forward pass of that class
    alone: in one that was taken from the block before, everything was kept (Llama 3 8B on two H200: 108 GiB for 78).
    """
    return type(self).forward(self, *args, **kwargs)
