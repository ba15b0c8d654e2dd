"""Compute the tolerance of each recorded number from the spread of repeated runs.

A tolerance is three times the largest difference between the repeated runs, since two or three runs do not show the
whole spread. It is at least a floor, since two runs may agree by chance. Each tolerance records how it was computed.

On a CPU another processor adds in another order: a step's loss then differs in the seventh digit, and hundreds of steps
later by several percent. Repeated runs with other threads or instructions show by how much. So each part of the curve
has its own tolerance: a wrong setting shows in the early steps, where equal runs have not yet moved apart. The first
loss, before any update, differs by rounding only: other data, labels or templates show there, however far apart equal
runs move. (The first loss of pairs says nothing: it is ln 2 or another constant.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from statistics import fmean
from typing import TypeVar

from tunebook.config.choices import Compute, Generation
from tunebook.config.schema import RunConfig
from tunebook.evidence.schema import Results, Tolerance
from tunebook.facts.methods import method_facts

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

LOSS, FIRST_LOSS, SPEED, MEMORY = "loss", "first_loss", "speed", "memory"
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


def loss_differences(measured: Sequence[float], expected: Sequence[float]) -> list[float]:
    """The differences of two curves' windows, each relative to the larger size of the window's and the curve's losses.

    Where a curve has fallen to a hundredth, equal runs differ by several times their small loss, which means nothing.
    Some losses of pairs are negative.
    """
    windows = zip(split_windows(measured), split_windows(expected), strict=True)
    pairs, overall = [(fmean(loss), fmean(reference)) for loss, reference in windows], fmean(map(abs, expected))
    return [
        abs(loss - reference) / max(abs(reference), overall) if loss != reference else 0.0 for loss, reference in pairs
    ]


def relative(measured: float, expected: float) -> float:
    """The difference relative to the expected value; huge if that is zero."""
    return abs(measured - expected) / max(abs(expected), 1e-12)


def compute_tolerances(runs: Sequence[Results], config: RunConfig) -> dict[str, Tolerance]:
    """Compute the tolerances from repeated runs; from a single run, the floors."""
    rounding = tolerance_of(config)
    tolerances = {LOSS: _of_losses([run.losses for run in runs], rounding)}
    if not method_facts(config).has_reference and all(run.steps[0] == 1 for run in runs):
        spreads = [relative(first.losses[0], second.losses[0]) for first, second in combinations(runs, 2)]
        tolerances[FIRST_LOSS] = _tolerance(spreads, rounding, "the loss of step 1")
    for task, score in runs[0].scores.items():
        reached = [results.scores[task].value for results in runs if task in results.scores]
        spreads = [abs(first - second) for first, second in combinations(reached, 2)]
        if len(reached) == len(runs):
            name = f"score, {_STDERRS:g} standard errors or items"
            floor = _STDERRS * max(score.stderr or 0.0, 1 / score.num_items)  # the error of 0% and 100% is given as 0
            tolerances[score_key(task)] = _tolerance(spreads, floor, name, is_relative=False)
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


def _of_losses(curves: Sequence[Sequence[float]], floor: float) -> Tolerance:
    """The tolerance of each window of steps, and the largest of them.

    That of a window is of the runs' differences up to the end of the next window: on another machine, equal runs may
    move apart earlier.
    """
    num_windows = min(NUM_WINDOWS, len(curves[0]))
    pairs = [loss_differences(first, second) for first, second in combinations(curves, 2)]
    spreads = list(accumulate((max(window) for window in zip(*pairs, strict=True)), max)) or [0.0] * num_windows
    windows = [max(FACTOR * spread, floor) for spread in (*spreads[1:], spreads[-1])]
    largest = _tolerance(spreads[-1:] if pairs else [], floor, f"means of {num_windows} windows of steps")
    return largest.model_copy(update={"windows": [float(f"{value:.3g}") for value in windows]})


def _tolerance(spreads: Sequence[float], floor: float, name: str, *, is_relative: bool = True) -> Tolerance:
    """Three times the largest difference between the runs, at least the floor."""
    spread = max(spreads, default=0.0)
    measured = f"the runs differ by up to {spread:.2g}; {FACTOR:g} times that, " if spreads else ""
    return Tolerance(
        value=float(f"{max(FACTOR * spread, floor):.3g}"),
        kind="relative" if is_relative else "absolute",
        how=f"{name}: {measured}at least {floor:.3g}",
    )
