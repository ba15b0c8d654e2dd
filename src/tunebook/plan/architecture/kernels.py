"""Stand-ins for GPU kernels of attention and experts, and for CUDA's autocast, on tensors without memory.

The kernels save for the backward pass what GPU kernels save, and compute nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from tunebook.model.varlen_attention import attention_with_sinks

# The name that transformers gets for each kind of kernel.
MASKED, UNMASKED, VARLEN = "tunebook_masked", "tunebook_unmasked", "tunebook_by_lengths"


def register_kernels(on_call: Callable[[bool], None]) -> None:
    """Register the kernels as values of `attn_implementation`.

    `on_call` runs when the varlen kernel is called, with whether the model has attention sinks.
    """
    for name, attend in ((MASKED, _attend), (UNMASKED, _attend), (VARLEN, _varlen_kernel(on_call))):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, sdpa_mask if name == MASKED else lambda *_, **__: None)


class _Kernel(torch.autograd.Function):
    """Saves what flash and memory-efficient attention save.

    That is query, key, value, output, a number per query, and the mask.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        output = query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2).contiguous()
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, mask)
        return output


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
    """Attend as AttentionInterface expects: (batch, heads, tokens, size) to (batch, tokens, heads, size)."""
    query, key, value = _in_autocast_dtype(query, key, value)
    if attention_mask is not None:  # a mask repeats keys and values and is added to the scores
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (key, value))
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype)
    kernel: Any = _Kernel
    return kernel.apply(query, key, value, attention_mask), None


def _in_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    return tuple(tensor.to(torch.bfloat16) for tensor in tensors) if torch.is_autocast_enabled("cpu") else tensors


class _GroupedProduct(torch.autograd.Function):
    """Saves what torch's grouped product saves: no input of frozen experts, unlike transformers' fallback."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, weight: Any) -> Any:
        of_tokens, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(tokens if of_weight else None, weight if of_tokens else None)
        return tokens.new_empty(tokens.shape[0], weight.shape[2])


def grouped_product(tokens: Any, weight: Any, offs: Any) -> Any:
    """Multiply (tokens, inputs) with each expert's (inputs, outputs)."""
    kernel: Any = _GroupedProduct
    return kernel.apply(tokens.to(weight.dtype), weight)


class _GatedDeltaRule(torch.autograd.Function):
    """Saves what fla-core's kernel saves, and computes nothing.

    That is query and key with their norms' factors, value, the running sum of the gates in fp32, beta, and one row of a
    matrix (chunk, chunk) per token and head. Source: fla-core 0.6.0, ops/gated_delta_rule/chunk.py.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, gates: Any, beta: Any) -> Any:
        normed = [torch.empty_like(tensor) for tensor in (query, key)]
        factors = [tensor.new_empty(tensor.shape[:-1], dtype=torch.float32) for tensor in (query, key)]
        sums, rows = torch.empty_like(gates, dtype=torch.float32), key.new_empty(*value.shape[:-1], _CHUNK)
        ctx.save_for_backward(*normed, *factors, value, sums, beta, rows)
        return torch.empty_like(value)


_CHUNK = 64  # tokens


def gated_delta_rule(query: Any, key: Any, value: Any, *, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    """Compute (B, T, heads, size) as `chunk_gated_delta_rule` does for a row of any number of documents."""
    kernel: Any = _GatedDeltaRule
    return kernel.apply(*_in_autocast_dtype(query, key, value), g, beta), None


class _LinearAttention(torch.autograd.Function):
    """Saves what fla-core's kernel saves, and computes nothing: query, key, value, and the gates' running sum in fp32.

    Source: fla-core 0.6.0, ops/simple_gla/chunk.py.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, gates: Any) -> Any:
        ctx.save_for_backward(query, key, value, torch.empty_like(gates, dtype=torch.float32))
        return torch.empty_like(value)


def linear_attention(query: Any, key: Any, value: Any, gates: Any, **_: Any) -> tuple[Any, None]:
    """Compute (B, T, heads, size) as `chunk_simple_gla` does for a row of any number of documents."""
    kernel: Any = _LinearAttention
    return kernel.apply(*_in_autocast_dtype(query, key, value), gates), None


def _varlen_kernel(on_call: Callable[[bool], None]) -> Any:
    """torch's own kernel for packed rows, which is one operation in a compiled block's graph, as on a GPU."""
    groups = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(_attend_varlen, on_call=on_call, kernel=varlen_attn, groups=groups)


def _attend_varlen(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *,
    cu_seq_lens_q: Any, max_length_q: int, on_call: Any, kernel: Any, groups: dict[str, bool], dropout: float = 0.0,
    softcap: float | None = None, s_aux: Any = None, sliding_window: int | None = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attend with shapes as in `_attend` and a batch of one.

    `cu_seq_lens_q` (documents + 1,) holds the document boundaries. Raises: NotImplementedError if the model needs what
    such kernels cannot compute: see `model.varlen_attention`.
    """
    if dropout or softcap is not None:
        raise NotImplementedError("dropout of the attention, or a cap on its logits")
    on_call(s_aux is not None)
    parts = [tensor.transpose(1, 2).squeeze(0) for tensor in _in_autocast_dtype(query, key, value)]
    if s_aux is not None:
        window = -1 if sliding_window is None else sliding_window - 1
        query, key, value = parts
        attended = attention_with_sinks(query, key, value, s_aux, cu_seq_lens_q, max_length_q, None, window)
        return attended.unsqueeze(0), None
    options = groups if parts[0].shape[1] != parts[1].shape[1] else {}
    ends, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    return kernel(*parts, *ends, *longest, **options).unsqueeze(0), None


# Functions of decoder layers that CUDA's autocast computes in fp32 and the CPU's does not. A LayerNorm of bf16 numbers
# saves its input in fp32 on a GPU. Source: PyTorch's list "CUDA Ops that can autocast to float32" (torch.amp).
_IN_FP32 = frozenset({
    "__pow__", "__rpow__", "cumprod", "cumsum", "exp", "expm1", "group_norm", "layer_norm", "log", "log10", "log1p",
    "log2", "log_softmax", "norm", "pow", "prod", "reciprocal", "rsqrt", "softmax", "softmin", "softplus", "sum",
})  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Under the CPU's autocast, casts to fp32 what CUDA's autocast would compute in fp32."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with its inputs cast if it is on the list."""
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_in_fp32, args))
            kwargs = {name: _in_fp32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
