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
        statistics = _Statistics(len(targets), hidden.device)
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        cast, cast_bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        buffer = torch.empty((min(len(hidden), TILE_TOKENS), len(weight)), device=hidden.device, dtype=dtype)
        for start in range(0, len(hidden), TILE_TOKENS):
            tokens = slice(start, min(start + TILE_TOKENS, len(hidden)))
            inputs = hidden.detach()[tokens].to(dtype)
            tile = buffer[: len(inputs)]
            torch.mm(inputs, cast.t(), out=tile)
            if cast_bias is not None:
                tile.add_(cast_bias)
            statistics.fold(tile, targets, tokens, shape)
            _logits_gradient(tile, targets[tokens], statistics.log_z(tokens), shape)
            gradients.add(tile, inputs, cast, tokens)
        ctx.gradients = gradients.by_input()
        return statistics.target_logit - statistics.log_z(slice(None)), None, None, None, None

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


class _Statistics:
    """The results of TRL's forward kernel for each token, (N,) in fp32."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        def filled(value: float) -> torch.Tensor:
            return torch.full((num_tokens,), value, device=device, dtype=torch.float32)

        self.max, self.sum_exp, self.target_logit = filled(float("-inf")), filled(0.0), filled(0.0)
        self._unused = filled(0.0)

    def fold(self, tile: torch.Tensor, targets: torch.Tensor, tokens: slice, shape: dict[str, Any]) -> None:
        """Process all logits of some tokens, (n, V)."""
        kernel = chunked_logprob._forward_kernel[(len(tile),)] if _is_triton(tile) else chunked_logprob._forward_tile
        flags = {f"HAS_{name.upper()}": False for name in chunked_logprob.OPTIONAL_OUTPUTS}
        unused = self._unused[tokens]
        kernel(
            tile, tile.stride(0), targets[tokens], self.max[tokens], self.sum_exp[tokens], unused, unused, unused,
            unused, self.target_logit[tokens], 0, tile.shape[1], BLOCK_SIZE=chunked_logprob._BLOCK_SIZE, **flags,
            **shape,
        )  # fmt: skip

    def log_z(self, tokens: slice) -> torch.Tensor:
        """The logarithm of the sum over the vocabulary."""
        return self.max[tokens] + torch.log(self.sum_exp[tokens])


def _logits_gradient(tile: torch.Tensor, targets: torch.Tensor, log_z: torch.Tensor, shape: dict[str, Any]) -> None:
    """Replace the logits by their gradient of the sum of the tokens' log-probabilities."""
    size = chunked_logprob._BLOCK_SIZE
    grid = (len(tile), -(-tile.shape[1] // size))
    kernel = chunked_logprob._backward_kernel[grid] if _is_triton(tile) else chunked_logprob._backward_tile
    kernel(
        tile, tile.stride(0), targets, log_z, log_z, torch.ones_like(log_z), log_z, 0, tile.shape[1],
        HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, BLOCK_SIZE=size, **shape,
    )  # fmt: skip


class _Gradients:
    """The gradients of hidden states, weight and bias, in fp32 as upstream's; None for an input that needs none."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        def empty(tensor: torch.Tensor | None, is_needed: bool) -> torch.Tensor | None:
            return torch.empty_like(tensor, dtype=torch.float32) if tensor is not None and is_needed else None

        inputs = (hidden, weight, bias)
        self._dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        self._hidden, self._weight, self._bias = map(empty, inputs, needed[:3])

    def add(self, tile: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, tokens: slice) -> None:
        """Add the gradients from a tile of the logits' gradients, (n, V)."""
        is_first = tokens.start == 0
        if self._hidden is not None:
            _product(self._hidden[tokens], tile, weight, is_added=False)
        if self._weight is not None:
            _product(self._weight, tile.t(), inputs, is_added=not is_first)
        if self._bias is not None:
            summed = tile.sum(dim=0, dtype=torch.float32)
            self._bias = summed if is_first else self._bias + summed

    def by_input(self) -> list[tuple[torch.Tensor | None, torch.dtype | None]]:
        """Each gradient with the format that autograd expects."""
        return list(zip((self._hidden, self._weight, self._bias), self._dtypes, strict=True))


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
