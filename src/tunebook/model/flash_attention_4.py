"""flash-attn 4's kernels for packed rows as one operation of torch, which compiled blocks can call.

transformers' own way to them looks at the number of the block that calls it, so that every block is compiled anew; and
the package's functions are Python, which the compiler would look into. An operation with a shape is all it needs.
Source: flash-attn-4 4.0.0b36, flash_attn/cute/interface.py. Its functions for one direction each are not public, so the
package is held to that version. Losses by them: the series `flash_4` of tests/bench/results/h200x2_parity.jsonl.

Shapes: T tokens of all documents together, H heads, G heads of keys and values, D numbers a head.
"""

from __future__ import annotations

from typing import Any

import torch

_WHOLE = -1  # a window that has no end


@torch.library.custom_op("tunebook::flash_attention_4", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq: torch.Tensor,
    max_length: int,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result (T, H, D), and (H, T) logarithms of the sums that the backward pass divides by, in fp32."""
    from flash_attn.cute.interface import _flash_attn_fwd

    attended, log_sums, *_ = _flash_attn_fwd(
        query, key, value, softmax_scale=scale, return_lse=True, **_documents(cu_seq, max_length, window)
    )
    return attended.contiguous(), log_sums.contiguous()  # as the compiler is told below


@_forward.register_fake
def _forward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("tunebook::flash_attention_4_backward", mutates_args=())
def _backward(
    grad_attended: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    cu_seq: torch.Tensor,
    max_length: int,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    from flash_attn.cute.interface import _flash_attn_bwd

    found = _flash_attn_bwd(
        query, key, value, attended, grad_attended.contiguous(), log_sums, softmax_scale=scale,
        **_documents(cu_seq, max_length, window),
    )  # fmt: skip
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@_backward.register_fake
def _backward_shapes(_: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seq, *settings = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seq)
    ctx.settings = settings


def _gradients(ctx: Any, grad_attended: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return (*_backward(grad_attended, *ctx.saved_tensors, *ctx.settings), None, None, None, None)


_forward.register_autograd(_gradients, setup_context=_keep)


def _documents(cu_seq: torch.Tensor, max_length: int, window: int) -> dict[str, Any]:
    """How the kernels are told where documents are and what of them a token sees."""
    return {
        "causal": True, "window_size_left": None if window == _WHOLE else window,
        "cu_seqlens_q": cu_seq, "cu_seqlens_k": cu_seq, "max_seqlen_q": max_length, "max_seqlen_k": max_length,
    }  # fmt: skip


def flash_attention_4(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (_WHOLE, 0),
) -> torch.Tensor:
    """Causal attention of each document to itself, as torch's `varlen_attn` is called.

    Shapes: query (T, H, D), key and value (T, G, D), in bf16 or fp16; cu_seq_q (documents + 1,) in int32, which also
    stands for cu_seq_k; the result (T, H, D).
    """
    attended: torch.Tensor = _forward(query, key, value, cu_seq_q, max_q, scale, window_size[0])[0]
    return attended
