"""The transformer blocks of a model: found by class, and compiled one by one.

Compiling turns a block's norms, activations, casts and sums into a few kernels. All blocks share one compilation; the
whole model would take minutes. Hooks, such as FSDP's, stay outside, since only the block's `forward` is replaced.
transformers recomputes activations inside that, so the compiler handles it, except for blocks with frozen parameters
(`_OutsideTheGraph`). The row length is dynamic, so rows of another length compile nothing again.

torch decides what a compiled block keeps for the backward pass: whatever takes time to recompute. With a memory budget
below 1 it keeps less: first norms and activation functions are computed twice, then products and attention.

The routers of a mixture of experts: transformers' hooks find the list to record logits into through a `ContextVar`
(utils/output_capturing.py, 5.23), which torch's compiler cannot trace: it cut each block of Qwen3-MoE into several
graphs. So a list of the block's own is part of the graph, and what it holds is handed on outside. Activation
checkpointing is outside, too: inside, the compiler refuses to change a list.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.utils.output_capturing import _active_collector

from tunebook.errors import RequestError
from tunebook.facts.architectures import CHOSEN_EXPERTS, EXPERTS
from tunebook.facts.compiling import set_up_compiler


def compile_layers(model: nn.Module, *, memory_budget: float | None = None, backend: Any = "inductor") -> int:
    """Compile the forward pass of every block of text at its first run; returns the number of blocks.

    A tower for images computes on the host what decides its shapes, and would be cut into many graphs.

    `memory_budget`: see `set_up_compiler`. `backend` as torch.compile's.
    Raises: RequestError if transformers does not declare the blocks' classes.
    """
    blocks: list[Any] = list(text_blocks(model).values())
    if not blocks:
        raise RequestError(
            f"model.compile_layers=true: transformers does not say which parts of {type(model).__name__} are its "
            "blocks; try model.compile_layers=false",
            problem_id="no-layers-to-compile",
        )
    set_up_compiler(memory_budget)
    has_routers = "router_logits" in (getattr(model, "_can_record_outputs", None) or {})
    for block in blocks:
        replaced = vars(block).get("forward")
        compiled = torch.compile(replaced or MethodType(block_forward, block), backend=backend)
        has_frozen = any(not parameter.requires_grad for parameter in block.parameters())
        forward = _OutsideTheGraph(block, compiled) if has_frozen else compiled
        if has_routers and replaced is None:
            recorded = torch.compile(MethodType(forward_with_logits, block), backend=backend)
            forward = WithRouterLogits(forward, _OutsideTheGraph(block, recorded))
        block.forward = forward
    return len(blocks)


def block_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A block's forward pass, looked up in its class at call time.

    FSDP changes the class of a block later, and transformers recomputes activations only in that class' forward pass.
    """
    return type(self).forward(self, *args, **kwargs)


class _OutsideTheGraph:
    """The compiled forward pass of a block, recomputed as a whole if activation checkpointing is on.

    With checkpointing inside the graph, adapters with dropout crashed the compiler of torch 2.11 on H200s. torch's
    checkpointing around the compiled block restores the random generators. It also recomputes the block's last product,
    which the compiler avoids; so fully trained blocks leave the checkpointing to the compiler.

    transformers 5.23 has the checkpointing inside `forward`. A release with it around the call would do it twice.
    """

    def __init__(self, block: Any, compiled: Any) -> None:
        self._block, self._compiled = block, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        if not (getattr(block, "gradient_checkpointing", False) and block.training):
            return self._compiled(*args, **kwargs)
        # As transformers calls it: inputs with a gradient are in `args`, the others are no inputs for autograd.
        return block._gradient_checkpointing_func(partial(self._keep_all, **kwargs), *args)

    def _keep_all(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass without transformers' own checkpointing."""
        block = self._block
        block.gradient_checkpointing = False
        try:
            return self._compiled(*args, **kwargs)
        finally:
            block.gradient_checkpointing = True


def text_blocks(model: Any) -> dict[str, Any]:
    """Every block that processes text by its name in the model, without those of an image tower."""
    of_text = set(model.get_decoder().modules())
    return {name: block for name, block in transformer_blocks(model).items() if block in of_text}


def transformer_blocks(model: nn.Module) -> dict[str, Any]:
    """Every block by its name in the model; empty if transformers does not declare the blocks' classes."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    return {name: module for name, module in model.named_modules() if type(module).__name__ in classes}


_KEY = "router_logits"
_collector: Any = _active_collector


def name_experts(text: Any) -> bool:
    """Let a config answer to TRL's keys for the numbers of experts (trl 1.16, _fused_forward); False if it has none.

    Saved configs keep their own keys.
    """
    for keys in (EXPERTS, CHOSEN_EXPERTS):
        own_key = next((key for key in keys if getattr(text, key, None)), None)
        if own_key is None:
            return False
        if own_key != keys[0]:
            type(text).attribute_map = {**type(text).attribute_map, keys[0]: own_key}
    return True


def forward_with_logits(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A block's forward pass, and the logits of its routers."""
    recorded: dict[str, list[Any]] = {_KEY: []}
    before = _collector.compiling, _collector.global_var
    _collector.compiling, _collector.global_var = True, recorded
    output = type(self).forward(self, *args, **kwargs)
    _collector.compiling, _collector.global_var = before
    return output, recorded[_KEY]


class WithRouterLogits:
    """The compiled forward pass of a block with experts: `recorded` if the pass asks for router logits."""

    def __init__(self, compiled: Any, recorded: Any) -> None:
        self._compiled, self._recorded = compiled, recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block, and hand on the logits that the pass asks for."""
        collected = _collector.get()
        if collected is None or _KEY not in collected:
            return self._compiled(*args, **kwargs)
        output, logits = self._recorded(*args, **kwargs)
        collected[_KEY].extend(logits)
        return output
