"""Which tensors are alive at once while layers with experts are computed in both passes, without any memory.

As `live_tensors`, for Qwen3-MoE and gpt-oss. The grouped product has stand-ins, as in `plan.architecture.saved`. An
index's gradient is added up in place, as on a GPU; tensors without memory would make another copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from tunebook.plan.architecture import kernels, saved
from tunebook.plan.architecture.kernels import UNMASKED, grouped_product
from tunebook.plan.architecture.targets import names_beside_experts

from .live_tensors import LAST, MIDDLE, NUM_LAYERS, TOKENS, Living, Way, follow, without_memory
from .live_tensors import inputs_with_adapter as with_adapter

HIDDEN, HEADS, HEAD_SIZE, CHOSEN = 1024, 16, 64, 4
_EXPERTS = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}
_SIZE = {"qwen3_moe": "moe_intermediate_size", "gpt_oss": "intermediate_size"}


def experts_at_work(kind: str, inner: int, way: Way) -> tuple[float, float]:
    """Bytes per token that the last layer's forward and backward passes need in addition to what layers keep.

    The forward pass is that of a layer that is not recomputed.
    """
    is_frozen = way.is_adapter
    with _tensors_without_memory(is_frozen):
        mode = ("autocast" if way.is_mixed else "fp32", "", "flash")
        model = _build(kind, inner, way)
        layer = saved._saved_by_layer(model, NUM_LAYERS, TOKENS, mode, [])[0][MIDDLE]
    with _tensors_without_memory(is_frozen):
        model = _build(kind, inner, way)
        living = follow(model, way, _LivingExperts(model))
    element = way.weights.itemsize
    positions, hidden = 2 * HEAD_SIZE * element * TOKENS, HIDDEN * element * TOKENS
    if way.is_recomputed:  # inputs of layers, the output and its gradient are counted elsewhere
        return 0.0, (living[f"backward {LAST}"] - layer - positions - (NUM_LAYERS + 2) * hidden) / TOKENS
    forward = living[f"forward {LAST}"] - NUM_LAYERS * layer - positions
    return forward / TOKENS, (living[f"backward {LAST}"] - living["kept"]) / TOKENS


class _LivingExperts(Living):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._shapes |= {(shape[0], shape[2], shape[1]) for shape in self._shapes if len(shape) == 3}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.index_put.default:
            function = torch.ops.aten.index_put_.default
        return super().__torch_dispatch__(function, types, args, kwargs)


def _build(kind: str, inner: int, way: Way) -> nn.Module:
    sizes = {_EXPERTS[kind]: 8, _SIZE[kind]: inner, "num_experts_per_tok": CHOSEN, "head_dim": HEAD_SIZE}
    config = AutoConfig.for_model(
        kind, hidden_size=HIDDEN, num_hidden_layers=NUM_LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        vocab_size=1000, pad_token_id=1, eos_token_id=2, max_position_embeddings=131072, **sizes,
    )  # fmt: skip
    config.layer_types = ["full_attention"] * NUM_LAYERS
    model = AutoModelForCausalLM.from_config(config, dtype=way.weights, attn_implementation=UNMASKED)
    if way.is_adapter:
        model = with_adapter(model, tuple(names_beside_experts(model)))
    return model.train()


@contextlib.contextmanager
def _tensors_without_memory(is_frozen: bool) -> Iterator[None]:
    """As for other layers; the stand-in for the product of frozen experts gets a backward pass."""
    backward = mock.patch.object(kernels._GroupedProduct, "backward", staticmethod(_product_backward))
    product = mock.patch.object(moe, "_grouped_mm", grouped_product) if is_frozen else contextlib.nullcontext()
    with without_memory(), backward, product:
        yield


def _product_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    _, weight = ctx.saved_tensors
    return gradient.new_empty(gradient.shape[0], weight.shape[1]), None
