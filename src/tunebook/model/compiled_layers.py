"""Each transformer block compiled by itself: its norms, activations, casts and sums become a few kernels.

All blocks share one compilation, where the whole model would take minutes. What is hooked to a block, as by FSDP, stays
outside, since only its `forward` is replaced; transformers has put the recomputing of activations inside that, where
the compiler decides about it, but for blocks with frozen parts (`_OutsideTheGraph`). How long a pass is stays open, so
rows of another length compile nothing again.

What a compiled block keeps for the backward pass torch decides: whatever costs time to have again, be it only that it
has to be written to memory once more. Where that is not kept (`recomputes`) norms and activation functions are computed
twice, and products, attention and the like still once: what is called selective activation checkpointing.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError
from tunebook.facts.compiling import set_up_compiler
from tunebook.model.blocks import transformer_blocks

if TYPE_CHECKING:
    from torch import nn


def compile_layers(model: nn.Module, *, recomputes: bool = False, backend: str = "inductor") -> int:
    """Compile the forward pass of every transformer block, when it is first run; how many there are.

    `recomputes`: what costs little is computed again in the backward pass and not kept for it.

    Raises: RequestError where transformers does not say which of the model's classes are its blocks.
    """
    import torch

    blocks: list[Any] = list(transformer_blocks(model).values())
    if not blocks:
        raise RequestError(
            f"model.compile_layers=true: transformers does not say which parts of {type(model).__name__} are its "
            "blocks; try model.compile_layers=false",
            problem_id="no-layers-to-compile",
        )
    set_up_compiler(recomputes=recomputes)
    for block in blocks:
        own = vars(block).get("forward")  # where something has put another in its place
        compiled = torch.compile(own or MethodType(_forward, block), backend=backend)
        has_frozen = any(not parameter.requires_grad for parameter in block.parameters())
        block.forward = _OutsideTheGraph(block, compiled) if has_frozen else compiled
    return len(blocks)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A block's forward pass, by the class that it has when it is called.

    FSDP gives a block another class later, and transformers recomputes activations in the forward pass of that class
    alone: in one that was taken from the block before, everything was kept (Llama 3 8B on two H200: 108 GiB for 78).
    """
    return type(self).forward(self, *args, **kwargs)


class _OutsideTheGraph:
    """The compiled forward pass of a block, recomputed as a whole where its activations are not to be kept.

    Left inside the graph, adapters with dropout ended the compiler of torch 2.11 on H200s, when it divided the graph
    into what is computed forward and backward ("Node add_420 was invalid, but is output"). torch's own recomputing
    around the compiled block divides nothing, and sets the random generators back for the second time. What only the
    block's output needs, as its last product, is computed twice so; weights that are all trained stay with the
    compiler, which leaves that out.

    transformers 5.23 puts the recomputing inside `forward`; a release that has it around the call would do it twice.
    """

    def __init__(self, block: Any, compiled: Any) -> None:
        self._block, self._compiled = block, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        if not (getattr(block, "gradient_checkpointing", False) and block.training):
            return self._compiled(*args, **kwargs)
        # As transformers calls it: what needs a gradient is among `args`, the rest of it is no input of autograd's.
        return block._gradient_checkpointing_func(partial(self._keep_all, **kwargs), *args)

    def _keep_all(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass without recomputing, which would be transformers' once more."""
        block = self._block
        block.gradient_checkpointing = False
        try:
            return self._compiled(*args, **kwargs)
        finally:
            block.gradient_checkpointing = True
