"""Compute the tolerance of each recorded number from the spread of repeated runs.

A tolerance is three times the largest difference between the repeated runs, since two or three runs do not show the
whole spread. It is at least a floor, since two runs may agree by chance. Each tolerance records how it was computed.

On a CPU another processor adds in another order: a step's loss then differs in the seventh digit, and hundreds of steps
later by several percent. Repeated runs with other threads or instructions show by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean
from typing import TypeVar

from tunebook.config.choices import Compute, Generation
from tunebook.config.schema import RunConfig
from tunebook.evidence.schema import Results, Tolerance

FACTOR = 3.0
NUM_WINDOWS = 20  # of a loss curve: after hundreds of steps, single losses of equal runs differ, their means hardly do
_SPEED_FLOOR = 0.05  # another job on the machine, a warmer GPU
_MEMORY_FLOOR = 0.02  # rounding of the allocator, another choice of kernels
_MAY_SPREAD = 0.1  # of speed or memory: a larger spread shows the machine's other load and supports no tolerance
_STDERRS = 3.0
# What losses may differ by when sums are added in another order, relative: in fp32 that moves the seventh digit and
# grows with the steps; in bf16 the third digit of every product. Measured on 50 steps: see benchmarks/results.
CPU_TOLERANCE, FP32_TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-5, 1e-4, 2e-3
FP8_TOLERANCE = 1e-2  # of strategies that all compute in fp8: not measured. fp8 was up to 1.2% from bf16 in 50 steps

LOSS, SPEED, MEMORY = "loss", "speed", "memory"
Value = TypeVar("Value")


def tolerance_of(config: RunConfig) -> float:
    """The allowed relative difference of losses for a resolved configuration."""
    if config.precision.compute is Compute.fp8:
        return FP8_TOLERANCE
    if config.precision.compute is not Compute.fp32:
        return LOW_PRECISION_TOLERANCE
    return CPU_TOLERANCE if config.hardware.generation is Generation.cpu else FP32_TOLERANCE


def score_key(task: str) -> str:
    """The key of a task's tolerance."""
    return f"score:{task}"


def split_windows(values: Sequence[Value]) -> list[Sequence[Value]]:
    """Split a curve into up to 20 windows of equally many steps; none for an empty curve."""
    num = min(NUM_WINDOWS, len(values))
    edges = [round(index * len(values) / num) for index in range(num + 1)] if num else []
    return [values[first:end] for first, end in pairwise(edges)]


def loss_difference(measured: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two curves' windows, relative to the larger of the window's and the curve's mean.

    Where a curve has fallen to a hundredth, equal runs differ by several times their small loss, which means nothing.
    """
    windows = zip(split_windows(measured), split_windows(expected), strict=True)
    pairs, overall = [(fmean(loss), fmean(reference)) for loss, reference in windows], fmean(expected)
    return max(
        abs(loss - reference) / max(reference, overall) if loss != reference else 0.0 for loss, reference in pairs
    )


def relative(measured: float, expected: float) -> float:
    """The difference relative to the expected value; huge if that is zero."""
    return abs(measured - expected) / max(abs(expected), 1e-12)


def compute_tolerances(runs: Sequence[Results], config: RunConfig) -> dict[str, Tolerance]:
    """Compute the tolerances from repeated runs; from a single run, the floors."""
    losses = [loss_difference(first.losses, second.losses) for first, second in combinations(runs, 2)]
    name = f"means of {min(NUM_WINDOWS, len(runs[0].losses))} windows of steps"
    tolerances = {LOSS: _tolerance(losses, tolerance_of(config), name)}
    for task, score in runs[0].scores.items():
        reached = [results.scores[task].value for results in runs if task in results.scores]
        spreads = [abs(first - second) for first, second in combinations(reached, 2)]
        if len(reached) == len(runs):
            name = f"score, {_STDERRS:g} standard errors"
            tolerances[score_key(task)] = _tolerance(spreads, _STDERRS * (score.stderr or 0.0), name, is_relative=False)
    for key, values, floor, name in (
        (SPEED, [results.tokens_per_second_per_gpu for results in runs], _SPEED_FLOOR, "tokens per second and GPU"),
        (MEMORY, [results.memory_gib for results in runs], _MEMORY_FLOOR, "peak memory"),
    ):
        known = [value for value in values if value is not None]
        if len(known) == len(runs) and relative(max(known), min(known)) <= _MAY_SPREAD:
            tolerances[key] = _tolerance(
                [relative(first, second) for first, second in combinations(known, 2)], floor, name
            )
    return tolerances


def _tolerance(spreads: Sequence[float], floor: float, name: str, *, is_relative: bool = True) -> Tolerance:
    """Three times the largest difference between the runs, at least the floor."""
    spread = max(spreads, default=0.0)
    measured = f"the runs differ by up to {spread:.2g}; {FACTOR:g} times that, " if spreads else ""
    return Tolerance(
        value=float(f"{max(FACTOR * spread, floor):.3g}"),
        kind="relative" if is_relative else "absolute",
        how=f"{name}: {measured}at least {floor:.3g}",
    )
