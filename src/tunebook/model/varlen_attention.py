"""Attention over packed documents by kernels that transformers does not know, for it to call by their names.

`varlen_attention` is torch's `varlen_attn`, which computes each document by itself, as flash-attn 2 does, in bf16 or
fp16 from Ampere on. `varlen_attention_4` does so by flash-attn 4's kernels. `sdpa_by_document` is for what they
leave out: see `document_attention`. All are told where the documents of a row begin and end by the collator's
`cu_seq_lens_q`; without that nothing is computed.
Source: torch.nn.attention.varlen, from torch 2.10 on; transformers' AttentionInterface.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Attention
from tunebook.errors import RequestError
from tunebook.facts.attention import BY_DOCUMENT, COMPILED, COMPILED_BETA

if TYPE_CHECKING:
    import torch

# What a model may ask of an attention function and this one cannot do. By the names transformers gives them.
_NOT_SUPPORTED = {"softcap": "caps its attention logits", "s_aux": "has attention sinks"}


def register(implementation: Attention) -> None:
    """Let models be made with one of them as `attn_implementation`. Transformers then builds no mask for them."""
    from transformers import AttentionInterface

    kernel = _kernel_of(implementation)
    takes = frozenset(inspect.signature(kernel).parameters)  # looked at here: compiled layers cannot
    attention = partial(varlen_attention, kernel=kernel, kernel_takes=takes, name=implementation.value)
    AttentionInterface.register(implementation.value, attention)


def _kernel_of(implementation: Attention) -> Callable[..., Any]:
    if implementation is BY_DOCUMENT:
        from tunebook.model.document_attention import sdpa_by_document

        return sdpa_by_document
    if implementation is COMPILED_BETA:
        from tunebook.model.flash_attention_4 import flash_attention_4

        return flash_attention_4
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    *,
    kernel: Any,
    kernel_takes: frozenset[str],
    name: str = COMPILED.value,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each document to itself.

    Shapes: query (1, num_heads, num_tokens, head_size), key and value the same with their own number of heads,
    cu_seq_lens_q (num_documents + 1,) in int32; the result (1, num_tokens, num_heads, head_size). `kernel` is torch's,
    `kernel_takes` the names of what its version can be told, and `name` what users know it by.
    Raises: RequestError where the documents' places are not given, or the model asks for more than the kernel can.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise _not_possible(name, "rows come without the places of their documents", "packing=isolated")
    if asked := [why for option, why in _NOT_SUPPORTED.items() if more.get(option) is not None]:
        raise _not_possible(name, f"{type(module).__name__} {asked[0]}")
    if dropout:
        raise _not_possible(name, f"the model's config asks for a dropout of {dropout:g} of the attention")
    if sliding_window is not None and "window_size" not in kernel_takes and max_length_q > sliding_window:
        raise _not_possible(name, "the model has a sliding window, and this version of torch's kernel knows none")
    if scaling is not None and "scale" not in kernel_takes:
        query = query * (scaling * math.sqrt(query.shape[-1]))  # which the kernel divides by
    dtype = _kernel_dtype(query)
    # (1, heads, tokens, size) -> (tokens, heads, size); rotating the positions has made the two of them fp32
    query, key, value = (tensor.transpose(1, 2).squeeze(0).to(dtype) for tensor in (query, key, value))
    options = _options(kernel_takes, sliding_window, scaling, is_grouped=query.shape[1] != key.shape[1])
    attended: torch.Tensor = kernel(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options
    )
    return attended.unsqueeze(0), None


def _options(
    known: frozenset[str], sliding_window: int | None, scaling: float | None, *, is_grouped: bool
) -> dict[str, Any]:
    """The rest of the call. torch 2.10 took heads in groups without a word, and has since asked to be told."""
    left = sliding_window - 1 if sliding_window is not None else -1
    options: dict[str, Any] = {"window_size": (left, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        options["scale"] = scaling
    return options | ({"enable_gqa": True} if is_grouped and "enable_gqa" in known else {})


def _kernel_dtype(query: torch.Tensor) -> torch.dtype:
    """The format that the products are computed in: autocast's, where the model's weights are fp32."""
    import torch

    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _not_possible(
    name: str, why: str, fix: str = "attention=sdpa, or eager where the model has no sdpa"
) -> RequestError:
    return RequestError(
        f"attention={name} cannot compute this: {why}; try {fix}", problem_id="varlen-attention-not-possible"
    )
