"""The routers' loss of a mixture of experts: the logits of compiled blocks, and the keys of the numbers of experts.

transformers' hooks find the list to record into through a `ContextVar`, which torch's compiler cannot trace: it cut
each block of Qwen3-MoE into several graphs. So a list of the block's own is part of the graph, and what it holds is
handed on outside. Activation checkpointing is outside, too: inside, the compiler refuses to change a list.

Source: transformers 5.23, utils/output_capturing.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.utils.output_capturing import _active_collector

from tunebook.facts.architectures import CHOSEN_EXPERTS, EXPERTS

if TYPE_CHECKING:
    from torch import nn

_KEY = "router_logits"
_collector: Any = _active_collector


def name_experts(text: Any) -> bool:
    """Let a config answer to TRL's keys for the numbers of experts (trl 1.16, _fused_forward); False if it has none.

    Saved configs keep their own keys.
    """
    for keys in (EXPERTS, CHOSEN_EXPERTS):
        own = next((key for key in keys if getattr(text, key, None)), None)
        if own is None:
            return False
        if own != keys[0]:
            type(text).attribute_map = {**type(text).attribute_map, keys[0]: own}
    return True


def forward_with_logits(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A block's forward pass, and the logits of its routers."""
    found: dict[str, list[Any]] = {_KEY: []}
    before = _collector.compiling, _collector.global_var
    _collector.compiling, _collector.global_var = True, found
    output = type(self).forward(self, *args, **kwargs)
    _collector.compiling, _collector.global_var = before
    return output, found[_KEY]


class WithRouterLogits:
    """The compiled forward pass of a block with experts: `recorded` if the pass asks for router logits."""

    def __init__(self, compiled: Any, recorded: Any) -> None:
        self._compiled, self._recorded = compiled, recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block, and hand on the logits that the pass asks for."""
        wanted = _collector.get()
        if wanted is None or _KEY not in wanted:
            return self._compiled(*args, **kwargs)
        output, logits = self._recorded(*args, **kwargs)
        wanted[_KEY].extend(logits)
        return output
