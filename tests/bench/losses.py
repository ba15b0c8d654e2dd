"""The relative difference of the losses of two runs, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of the losses of two runs."""

    per_step: list[float]  # relative, of the steps that both have
    largest: float  # infinite if the steps differ, or a loss is not finite
    at_step: int | None  # the step with the largest difference, from 1


def compare_losses(losses: Sequence[float | None], reference: Sequence[float | None]) -> Difference:
    """The relative differences per step. A step that only one of them has counts as infinitely different."""
    per_step = [_relative(loss, other) for loss, other in zip(losses, reference, strict=False)]
    largest = max(per_step, default=math.inf)
    at_step = per_step.index(largest) + 1 if per_step else None
    if len(losses) != len(reference):
        largest, at_step = math.inf, len(per_step) + 1
    return Difference(per_step=per_step, largest=largest, at_step=at_step)


def _relative(loss: float | None, other: float | None) -> float:
    if loss is None or other is None or not (math.isfinite(loss) and math.isfinite(other)):
        return math.inf
    return abs(loss - other) / abs(other) if other else math.inf if loss else 0.0
