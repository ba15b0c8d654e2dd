"""Compute the output head's gradients in the forward pass, while the logits of a tile are in memory.

TRL's head keeps no logits, so its backward pass computes them again: 2 x vocabulary x hidden size operations per token,
3% of a 3B model's step. In SFT the log-probabilities of all tokens have the same factor in the loss, so the gradients
are known up to that factor as soon as the logits are. They are computed then, by TRL's own kernels, and the backward
pass only scales them. A tile contains the whole vocabulary.

Shapes: N trained tokens, H the hidden size, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from trl.kernels import ChunkedLogProbFunction, chunked_logprob
from trl.trainer import utils

upstream: Any = utils  # its forward pass looks up both names that are used here at call time
TILE_TOKENS = chunked_logprob.TOKEN_CHUNK_SIZE  # smaller tiles accumulate the weight's gradient in fp32 too often


@contextmanager
def one_pass_head() -> Iterator[None]:
    """Use one pass for TRL's fused head if gradients are needed.

    Only on a GPU: elsewhere upstream also computes untrained tokens, which have another factor.
    """
    before = upstream._ChunkedLogProbFunction
    upstream._ChunkedLogProbFunction = _OnePassOrTwo
    try:
        yield
    finally:
        upstream._ChunkedLogProbFunction = before


class _OnePassOrTwo:
    """Called like TRL's own function."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
        has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        is_one_pass = has_gradient and len(hidden) > 0 and upstream._use_triton(hidden.device)
        function = OnePassLogProbFunction if is_one_pass else ChunkedLogProbFunction
        return function.apply(hidden, weight, *others)  # type: ignore[no-untyped-call]


class OnePassLogProbFunction(torch.autograd.Function):
    """TRL's `ChunkedLogProbFunction` for a loss in which all tokens count equally.

    Without its other outputs. Raises: an assertion on the device in the backward pass, if the gradients of the
    log-probabilities differ.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (N, H)
        weight: torch.Tensor,  # (V, H)
        bias: torch.Tensor | None,  # (V,)
        targets: torch.Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[torch.Tensor | None, ...]:
        """(N,): the targets' log-probabilities in fp32, where upstream has five outputs."""
        ctx.set_materialize_grads(False)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        shape = {"logit_scale": logit_scale, "softcap": final_logit_softcapping or 1.0, "inv_t": 1 / temperature,
                 "HAS_SOFTCAP": final_logit_softcapping is not None}  # fmt: skip
        inputs = (hidden, weight, bias)
        hidden_grad, weight_grad, bias_grad = (
            torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and is_needed else None
            for tensor, is_needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        )
        log_probs = torch.empty(len(targets), device=hidden.device, dtype=torch.float32)
        cast, cast_bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        buffer = torch.empty((min(len(hidden), TILE_TOKENS), len(weight)), device=hidden.device, dtype=dtype)
        for start in range(0, len(hidden), TILE_TOKENS):
            tokens = slice(start, min(start + TILE_TOKENS, len(hidden)))
            states = hidden.detach()[tokens].to(dtype)
            tile = buffer[: len(states)]
            torch.mm(states, cast.t(), out=tile)
            if cast_bias is not None:
                tile.add_(cast_bias)
            log_probs[tokens], log_z = _log_probs(tile, targets[tokens], shape)
            _logits_gradient(tile, targets[tokens], log_z, shape)
            if hidden_grad is not None:
                _product(hidden_grad[tokens], tile, cast, is_added=False)
            if weight_grad is not None:
                _product(weight_grad, tile.t(), states, is_added=start > 0)
            if bias_grad is not None:
                bias_grad += tile.sum(dim=0, dtype=torch.float32)
        dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.gradients = list(zip((hidden_grad, weight_grad, bias_grad), dtypes, strict=True))
        return log_probs, None, None, None, None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients, scaled by the common factor of the log-probabilities."""
        gradients, ctx.gradients = ctx.gradients, None
        nothing = (None,) * 6
        if grad_logprobs is None:
            return (None, None, None, *nothing)
        assert gradients is not None, "one backward pass per forward pass: the gradients were handed over"
        factor = grad_logprobs[0]
        torch._assert_async((grad_logprobs == factor).all(), "model.one_pass_head=true is for losses that weigh all "
                            "tokens alike")  # fmt: skip
        return (*(None if tensor is None else tensor.mul_(factor).to(dtype) for tensor, dtype in gradients), *nothing)


def _log_probs(tile: torch.Tensor, targets: torch.Tensor, shape: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of the targets, and the logarithm of the sum over the vocabulary; (n,) of logits (n, V)."""
    sum_exp, target_logit, unused = torch.zeros((3, len(tile)), device=tile.device, dtype=torch.float32)
    highest = torch.full_like(sum_exp, float("-inf"))
    kernel = chunked_logprob._forward_kernel[(len(tile),)] if _is_triton(tile) else chunked_logprob._forward_tile
    flags = {f"HAS_{name.upper()}": False for name in chunked_logprob.OPTIONAL_OUTPUTS}
    kernel(
        tile, tile.stride(0), targets, highest, sum_exp, unused, unused, unused, unused, target_logit, 0,
        tile.shape[1], BLOCK_SIZE=chunked_logprob._BLOCK_SIZE, **flags, **shape,
    )  # fmt: skip
    log_z = highest + torch.log(sum_exp)
    return target_logit - log_z, log_z


def _logits_gradient(tile: torch.Tensor, targets: torch.Tensor, log_z: torch.Tensor, shape: dict[str, Any]) -> None:
    """Replace the logits by their gradient of the sum of the tokens' log-probabilities."""
    size = chunked_logprob._BLOCK_SIZE
    grid = (len(tile), -(-tile.shape[1] // size))
    kernel = chunked_logprob._backward_kernel[grid] if _is_triton(tile) else chunked_logprob._backward_tile
    kernel(
        tile, tile.stride(0), targets, log_z, log_z, torch.ones_like(log_z), log_z, 0, tile.shape[1],
        HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, BLOCK_SIZE=size, **shape,
    )  # fmt: skip


def _product(product: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, is_added: bool) -> None:
    """`left @ right` in fp32, into `product` or added to it, not rounded to the format of the factors."""
    if is_added:
        chunked_logprob._addmm_fp32(product, left, right)
    elif product.device.type == "cuda" and left.dtype in (torch.float16, torch.bfloat16):
        torch.mm(left, right, out_dtype=torch.float32, out=product)
    else:
        torch.mm(left.float(), right.float(), out=product)


def _is_triton(tile: torch.Tensor) -> bool:
    return chunked_logprob._use_triton(tile.device)
