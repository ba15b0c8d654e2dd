"""Measure with forward passes how much the documents of one packed row affect each other.

Two documents of random tokens share a row; each has an image where the run's documents do. If the row is isolated, the
second document has the same logits as alone and keeps them when the first is replaced, and the row's loss is the sum of
the documents' losses. The effect of a leak is measured too, on the same tokens as one document: a probe that could not
detect it proves nothing, and the run is refused.

Distances are relative: the norm of the difference of two logit vectors, divided by the norm of the logits about their
mean; the largest over all tokens. They do not depend on the size of the vocabulary or of the logits.

Many layers can amplify rounding in rows of other shapes. So it is measured where nothing else can differ: the second
document alone, and ahead of the first one in their row. With experts, rounding may send a token to another expert,
which changes its logits entirely, so the median over the tokens is judged there: wrong positions move all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tunebook.config.choices import Compute

LENGTHS = (48, 32)  # tokens; the first is longer, so that a leak has a large effect on the second
# Below 128 tokens flex_attention uses another kernel, which no run trains with and which cannot compute some head sizes
# (gemma-2b in torch 2.11).
LENGTHS_FOR_FLEX = (168, 136)

# The unit roundoff of the products' format: 2 ** -(bits of the mantissa + 1).
# Trained layers in fp8 are probed in bf16: see `model.fp8.plain_products`. Frozen ones are probed as they are.
_UNIT_ROUNDOFF = {Compute.fp32: 2.0**-24, Compute.fp16: 2.0**-11, Compute.bf16: 2.0**-8, Compute.fp8: 2.0**-8}
_TF32_UNIT_ROUNDOFF = 2.0**-11
# Rounding errors of 100 layers add up to about sqrt(2 x 100) times one, and kernels choose tiles by a row's length.
_LOGIT_ROUNDOFFS = 32.0
# Replacing the other document changes no shape, so isolated logits stay equal: measured exactly 0, and at least 1.2e-3
# (fp32) and 6.5e-3 (bf16) for architectures that leak (benchmarks/results/isolation.jsonl).
_MOVED_ROUNDOFFS = 0.5
_MOVED_FP32_ROUNDOFFS = 16.0
# With experts, another document changes the number of tokens of each expert, and so how its products are tiled:
# measured 7.5e-7 in fp32 and 0.044 in bf16 (Qwen3-30B-A3B's layers). Smaller leaks cannot be detected.
_MOVED_FP32_ROUNDOFFS_OF_EXPERTS = 256.0
_SPREAD_OF_ROUNDING = 4.0  # of amplified rounding in two pairs of rows: 0.38 and 0.16 for 42 layers in bf16
_LOSS_ROUNDOFFS = 8.0  # a mean over many tokens, in which single errors cancel
# In fp32 each term of a product's sum is rounded, which adds up to sqrt(K) roundoffs for K terms: 128 for the 16,384
# terms of a 7B model's feed-forward network. Products in 16 bits or TF32 are summed in fp32.
_FP32_SUM_ROUNDOFFS = 128.0


class Forward(Protocol):
    """The run's own forward pass over one row, given as its documents' token ids."""

    def logits(self, documents: list[list[int]]) -> torch.Tensor:
        """Logits (num_tokens, vocab_size) in float32 of all documents' tokens, end to end."""

    def loss(self, documents: list[list[int]]) -> tuple[float, int]:
        """The summed negative log-likelihood as training computes it, and how many tokens it counts."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The measurements of one rank. The distances are relative, the losses are sums."""

    moved: float  # change of the second document's logits when the first one changes
    alone: float  # difference of the second document's logits in the row from those it has alone
    alone_median: float  # the same of half of its tokens
    rounding: float  # as `alone`, with the second document ahead of the first one in the row: only rounding differs
    rounding_median: float
    leaking: float  # the same if it does attend to the first
    loss_together: float
    loss_apart: float
    tokens_together: int
    tokens_apart: int

    @property
    def loss_difference(self) -> float:
        """The difference of the row's loss from the sum of the documents' losses, relative to that sum."""
        return abs(self.loss_together - self.loss_apart) / max(abs(self.loss_apart), 1e-30)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The effect that rounding alone may have, derived from the precision of the products."""

    moved: float  # of logits in rows of the same shape
    logits: float  # in rows of other shapes, unless more is measured
    loss: float
    has_experts: bool = False

    def sees_leaks(self, isolation: Isolation) -> bool:
        """True if the effect of a leak would exceed that of rounding."""
        return isolation.leaking > 2 * self.moved

    def between_shapes(self, isolation: Isolation) -> float:
        """The effect of rounding on logits in rows of other shapes, at most half the effect of a leak."""
        measured = isolation.rounding_median if self.has_experts else isolation.rounding
        return max(self.logits, min(_SPREAD_OF_ROUNDING * measured, isolation.leaking / 2))


def tolerance(compute: Compute, *, uses_tf32: bool, has_experts: bool = False) -> Tolerance:
    """The tolerance for a precision, and for a model with or without experts."""
    if compute is Compute.fp32 and not uses_tf32:
        exact = _UNIT_ROUNDOFF[compute]
        roundoff = _FP32_SUM_ROUNDOFFS * exact
        moved = exact * (_MOVED_FP32_ROUNDOFFS_OF_EXPERTS if has_experts else _MOVED_FP32_ROUNDOFFS)
    else:
        roundoff = _TF32_UNIT_ROUNDOFF if compute is Compute.fp32 else _UNIT_ROUNDOFF[compute]
        moved = roundoff * (_LOGIT_ROUNDOFFS if has_experts else _MOVED_ROUNDOFFS)
    return Tolerance(
        moved=moved, logits=_LOGIT_ROUNDOFFS * roundoff, loss=_LOSS_ROUNDOFFS * roundoff, has_experts=has_experts
    )


def measure_isolation(
    forward: Forward, vocab_size: int, lengths: tuple[int, int] = LENGTHS, image: Sequence[int] = ()
) -> Isolation:
    """Measure with eight forward passes over at most two documents. It uses its own random generator.

    `image` are the tokens of an image, which then are in the middle of each document.
    """
    draw = np.random.default_rng(0)
    drawn = draw.integers(0, vocab_size, lengths[0])
    second = _around(image, draw.integers(0, vocab_size, lengths[1]).tolist())
    other = _around(image, ((drawn + draw.integers(1, vocab_size, lengths[0])) % vocab_size).tolist())
    first = _around(image, drawn.tolist())
    length = len(first)
    together = forward.logits([first, second])[length:]
    moved = _distances(forward.logits([other, second])[length:], together).max()
    leaking = _distances(forward.logits([first + second])[length:], together).max()
    logits_alone = forward.logits([second])
    alone = _distances(together, logits_alone)
    rounding = _distances(forward.logits([second, first])[: len(second)], logits_alone)
    loss_together, tokens_together = forward.loss([first, second])
    apart = [forward.loss([document]) for document in (first, second)]
    return Isolation(
        moved=float(moved),
        alone=float(alone.max()),
        alone_median=float(alone.median()),
        rounding=float(rounding.max()),
        rounding_median=float(rounding.median()),
        leaking=float(leaking),
        loss_together=loss_together,
        loss_apart=sum(loss for loss, _ in apart),
        tokens_together=tokens_together,
        tokens_apart=sum(count for _, count in apart),
    )


def _around(image: Sequence[int], tokens: list[int]) -> list[int]:
    """A document with an image in its middle, and without other tokens of images."""
    if not image:
        return tokens
    text = next(token for token in range(len(image) + 1) if token not in image)
    plain = [text if token in image else token for token in tokens]
    return [*plain[: len(plain) // 2], *image, *plain[len(plain) // 2 :]]


def _distances(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The distances (num_tokens,) of two (num_tokens, vocab_size): 0 where they agree, NaN where one is not finite."""
    size = (others - others.mean(dim=-1, keepdim=True)).norm(dim=-1)
    distances: torch.Tensor = (logits - others).norm(dim=-1) / size.clamp(min=torch.finfo(torch.float32).tiny)
    return distances


def leaks(isolation: Isolation, allowed: Tolerance) -> list[str]:
    """The problems found; empty if the documents are isolated. A non-finite number is a problem."""
    wrong = []
    if not isolation.moved <= allowed.moved:
        wrong.append(f"the second document's logits move by {isolation.moved:.2g} when the first one changes")
    alone = isolation.alone_median if allowed.has_experts else isolation.alone
    if not alone <= allowed.between_shapes(isolation):
        wrong.append(f"they differ by {alone:.2g} from those that it has alone")
    if isolation.tokens_together != isolation.tokens_apart:
        together, apart = isolation.tokens_together, isolation.tokens_apart
        wrong.append(f"the row's loss counts {together} tokens, the two documents' {apart}")
    elif not isolation.loss_difference <= allowed.loss:
        wrong.append(f"the row's loss differs by {isolation.loss_difference:.2g} from the two documents' own")
    return wrong
