"""The relative difference of the losses of two runs, step by step, and the allowed difference.

What may differ: the order of sums. In fp32 that moves the seventh digit and grows with the steps; in bf16 the third
digit of every product, and a strategy may round at other places than one GPU does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunebook.config.choices import Compute, Generation
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError

# Relative. Measured on 50 steps: see tests/bench/results.
CPU_TOLERANCE = 1e-5
FP32_TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 2e-3
FP8_TOLERANCE = 1e-2  # of strategies that all compute in fp8: not measured. fp8 was up to 1.2% from bf16 in 50 steps


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of the losses of two runs."""

    per_step: list[float]  # relative, of the steps that both have
    largest: float  # infinite if the steps differ, or a loss is not finite
    at_step: int | None  # the step with the largest difference, from 1


def tolerance_of(config: RunConfig) -> float:
    """The allowed relative difference of losses for a resolved configuration."""
    if config.precision.compute is Compute.fp8:
        return FP8_TOLERANCE
    if config.precision.compute is not Compute.fp32:
        return LOW_PRECISION_TOLERANCE
    return CPU_TOLERANCE if config.hardware.generation is Generation.cpu else FP32_TOLERANCE


def check_tolerance(tolerance: float | None) -> None:
    """Raises: RequestError for a tolerance that is negative or not finite. 0 requires equal losses."""
    if tolerance is not None and not 0 <= tolerance < math.inf:  # nan fails both comparisons
        raise RequestError(
            f"--tolerance {tolerance:g}: this is the largest relative difference that losses may have, a number that "
            f"is finite and not below 0; type --tolerance {LOW_PRECISION_TOLERANCE:g}, --tolerance 0 for equal losses, "
            "or leave it out",
            problem_id="parity-request",
        )


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
