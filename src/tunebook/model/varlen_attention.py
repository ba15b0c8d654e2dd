"""Attention over packed documents by kernels that transformers does not have, registered under their names.

`varlen_attention` is torch's `varlen_attn`, which computes each document separately like flash-attn 2, in bf16 or fp16
from Ampere on. `sdpa_by_document` uses torch's sdpa for one document after the other, on every GPU and in fp32: for a
whole row, sdpa needs a mask of all tokens squared, which every layer keeps, and computes what the mask hides; one
document needs no mask, so any of sdpa's kernels can compute it. Both get the boundaries of the documents from the
collator's `cu_seq_lens_q`, and refuse to compute without them.

`varlen_attention` also computes attention sinks (GPT-OSS): a further logit for each head, in the softmax's sum only.
torch's kernel has none, but its backward pass computes the gradients from the result and the logarithm of the sum that
it is given. So both are corrected after the forward pass, and handed to the backward pass corrected.

Source: torch.nn.attention.varlen, from torch 2.10 on; transformers' AttentionInterface.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary

from tunebook.config.choices import Attention
from tunebook.errors import RequestError
from tunebook.facts.attention import BY_DOCUMENT, COMPILED

# Features that a model may require and these kernels lack, by their names in transformers.
_SINKS = "s_aux"
_NOT_SUPPORTED = {"softcap": "caps its attention logits", _SINKS: "has attention sinks"}
_lengths_of = WeakIdKeyDictionary()
_NO_LIMIT = -1  # a window that has no end


def register(implementation: Attention) -> None:
    """Register one of them as an `attn_implementation`. transformers then builds no mask."""
    from transformers import AttentionInterface

    kernel: Callable[..., Any] = sdpa_by_document
    if implementation is not BY_DOCUMENT:
        from torch.nn.attention.varlen import varlen_attn

        kernel = varlen_attn
    takes = frozenset(inspect.signature(kernel).parameters)  # here, since compiled layers cannot inspect it
    attention = partial(varlen_attention, kernel=kernel, kernel_takes=takes, name=implementation.value)
    AttentionInterface.register(implementation.value, attention)


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
    cu_seq_lens_q (num_documents + 1,) in int32; the result (1, num_tokens, num_heads, head_size). `kernel_takes` are
    the parameters of the kernel's version, `name` is the user's name for it.
    Raises: RequestError if the documents' boundaries are missing, or the model requires a feature the kernel lacks.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise _not_possible(name, "rows come without the places of their documents", "packing=isolated")
    sinks = more.pop(_SINKS, None) if name == COMPILED.value and "window_size" in kernel_takes else None
    for option, reason in _NOT_SUPPORTED.items():
        if more.get(option) is not None:
            raise _not_possible(name, f"{type(module).__name__} {reason}")
    if dropout:
        raise _not_possible(name, f"the model's config asks for a dropout of {dropout:g} of the attention")
    if sliding_window is not None and "window_size" not in kernel_takes and max_length_q > sliding_window:
        raise _not_possible(name, "the model has a sliding window, and this version of torch's kernel knows none")
    if scaling is not None and "scale" not in kernel_takes:
        query = query * (scaling * math.sqrt(query.shape[-1]))  # which the kernel divides by
    dtype = kernel_dtype(query)
    # (1, heads, tokens, size) -> (tokens, heads, size); rotating the positions has made the two of them fp32
    query, key, value = (tensor.transpose(1, 2).squeeze(0).to(dtype) for tensor in (query, key, value))
    if sinks is not None:
        window = _NO_LIMIT if sliding_window is None else sliding_window - 1
        return attention_with_sinks(query, key, value, sinks, cu_seq_lens_q, max_length_q, scaling, window)[None], None
    options = _options(kernel_takes, sliding_window, scaling, is_grouped=query.shape[1] != key.shape[1])
    attended: torch.Tensor = kernel(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options
    )
    return attended.unsqueeze(0), None


def _options(
    known: frozenset[str], sliding_window: int | None, scaling: float | None, *, is_grouped: bool
) -> dict[str, Any]:
    """The other arguments. torch 2.10 accepted grouped heads by default; later versions need `enable_gqa`."""
    left = sliding_window - 1 if sliding_window is not None else -1
    options: dict[str, Any] = {"window_size": (left, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        options["scale"] = scaling
    return options | ({"enable_gqa": True} if is_grouped and "enable_gqa" in known else {})


def kernel_dtype(query: torch.Tensor) -> torch.dtype:
    """The format of the products: autocast's, or the query's."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _not_possible(
    name: str, reason: str, fix: str = "attention=sdpa, or eager where the model has no sdpa"
) -> RequestError:
    return RequestError(
        f"attention={name} cannot compute this: {reason}; try {fix}", problem_id="varlen-attention-not-possible"
    )


def _varlen_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq: torch.Tensor, max_length: int, scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """torch's kernel: the result (T, H, D), and (H, T) logarithms of the sums over each query's keys, in fp32."""
    import torch.nn.attention.varlen  # defines the operation

    outputs = torch.ops.torch_attn._varlen_attn(
        *(query, key, value, cu_seq, cu_seq, max_length, max_length),
        is_causal=window == _NO_LIMIT, scale=scale, window_size=[window, 0],
    )  # fmt: skip
    return outputs[0], outputs[1]


def _varlen_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attended: torch.Tensor,
    log_sums: torch.Tensor, cu_seq: torch.Tensor, max_length: int, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of query, key and value by torch's kernel."""
    import torch.nn.attention.varlen

    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which it never has
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        *(grad.contiguous(), query, key, value, attended, log_sums, cu_seq, cu_seq, max_length, max_length),
        is_causal=window == _NO_LIMIT, rng_state=random, scale=scale, window_size=[window, 0],
    )  # fmt: skip
    return grads


class _AttentionWithSinks(torch.autograd.Function):
    """torch's kernel, corrected by the sinks in both directions. Inputs as `attention_with_sinks`."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor,
        cu_seq: torch.Tensor, max_length: int, scale: float, window: int,
    ) -> torch.Tensor:  # fmt: skip
        attended, log_sums = _varlen_forward(query, key, value, cu_seq, max_length, scale, window)
        whole = torch.logaddexp(log_sums, sinks.float()[:, None])  # (H, T), with the sinks, in fp32
        left = (log_sums - whole).exp().T[..., None]  # what the sinks leave of each query's weights
        attended = (attended * left).to(attended.dtype)
        ctx.save_for_backward(query, key, value, sinks, attended, whole, cu_seq)
        ctx.settings = max_length, scale, window
        return attended

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of query, key, value and sinks.

        With p the weights that include the sink, the kernel computes p * (grad . value - grad . attended) for the
        logits from `whole` and `attended`, which is right for them. The sink's value is zero, so its logit's gradient
        is -p_sink * (grad . attended), summed over the queries.
        """
        query, key, value, sinks, attended, whole, cu_seq = ctx.saved_tensors
        grads = _varlen_backward(grad, query, key, value, attended, whole, cu_seq, *ctx.settings)
        of_query = (grad.float() * attended.float()).sum(-1).T
        of_sinks = -(of_query * (sinks.float()[:, None] - whole).exp()).sum(1)
        return *grads, of_sinks.to(sinks.dtype), None, None, None, None


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    cu_seq: torch.Tensor,
    max_length: int,
    scale: float | None,
    window: int,
) -> torch.Tensor:
    """Causal attention of each document to itself, with a sink for each head.

    Shapes, for T tokens, H heads, G heads of keys and values and D numbers a head: query (T, H, D), key and value
    (T, G, D), in bf16 or fp16; sinks (H,); cu_seq (documents + 1,) in int32; the result (T, H, D). `window`: how many
    keys before itself a query attends to, -1 for all.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    function: Any = _AttentionWithSinks  # untyped upstream
    attended: torch.Tensor = function.apply(query, key, value, sinks, cu_seq, max_length, scale, window)
    return attended


def sdpa_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of each document to itself, with the signature of torch's `varlen_attn`.

    Shapes: query (num_tokens, num_heads, head_size), key and value the same with their own number of heads, cu_seq_q
    (num_documents + 1,); the result as the query. Grouped heads are repeated, as transformers does for sdpa, since not
    all of its kernels support groups.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = document_lengths(cu_seq_q)
    by_head = (torch.split(tensor.transpose(0, 1), lengths, dim=1) for tensor in (query, key, value))
    attended = [
        scaled_dot_product_attention(of_query[None], of_key[None], of_value[None], is_causal=is_causal, scale=scale)[0]
        for of_query, of_key, of_value in zip(*by_head, strict=True)
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)


def document_lengths(cu_seq_lens: torch.Tensor) -> list[int]:
    """The lengths on the host. All layers of a pass get the same tensor, so only the first one waits for the GPU."""
    if cu_seq_lens not in _lengths_of:
        _lengths_of[cu_seq_lens] = cu_seq_lens.diff().tolist()
    lengths: list[int] = _lengths_of[cu_seq_lens]
    return lengths
