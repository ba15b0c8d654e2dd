"""Compute the tolerance of each recorded number from the spread of repeated runs.

A tolerance is three times the largest difference between the repeated runs, since two or three runs do not show the
whole spread. It is at least a floor, since two runs may agree by chance. Each tolerance records how it was computed.

On a CPU two sets are computed. The same processor with the same threads and packages computes the same bits, so there
the loss may hardly differ. Another one adds in another order. A step's loss then differs in the seventh digit, and
hundreds of steps later, where the loss falls fast, by several percent. That is measured by runs with other threads
(`OMP_NUM_THREADS`) or instructions (`ATEN_CPU_CAPABILITY`), which are named together with the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise
from statistics import fmean
from typing import TypeVar

from tunebook.config.choices import Compute, Generation
from tunebook.config.schema import RunConfig
from tunebook.evidence.schema import Evidence, Results, Tolerance

FACTOR = 3.0
NUM_WINDOWS = 20  # of a loss curve: after hundreds of steps, single losses of equal runs differ, their means hardly do
SAME_PROCESSOR_FLOOR = 1e-6  # of the loss on a CPU: equal runs were equal in every bit
_SPEED_FLOOR = 0.05  # another job on the machine, a warmer GPU
_MEMORY_FLOOR = 0.02  # rounding of the allocator, another choice of kernels
_MAY_WAIT = 0.05  # share of the time that a CPU run may wait for a core: as much as its speed may differ
_SPEED_MAY_SPREAD = 0.1  # a larger spread shows the machine's other load, not the recipe's speed
_MEMORY_MAY_SPREAD = 1 / FACTOR  # a larger spread would allow everything down to zero
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


def loss_differences(found: Results, expected: Results) -> list[float]:
    """Return the windows' differences, relative to the larger of the expected mean and the whole curve's mean.

    Where a curve has fallen to a hundredth, equal runs differ by several times their small loss, which means nothing.
    """
    mine, means = ([fmean(window) for window in split_windows(results.losses)] for results in (found, expected))
    overall, pairs = fmean(means), zip(mine, means, strict=True)
    return [abs(one - mean) / max(mean, overall) if one != mean else 0.0 for one, mean in pairs]


def loss_difference(found: Results, expected: Results) -> float:
    """Return the largest difference of the windows; infinite if different steps were logged."""
    return max(loss_differences(found, expected)) if found.steps == expected.steps else float("inf")


def at_steps(results: Results, steps: Collection[int]) -> Results:
    """Return the results with the losses of only these steps."""
    kept = [(step, loss) for step, loss in zip(results.steps, results.losses, strict=True) if step in steps]
    return results.model_copy(update={"steps": [step for step, _ in kept], "losses": [loss for _, loss in kept]})


def relative(found: float, expected: float) -> float:
    """The difference relative to the expected value."""
    if expected == 0:
        return 0.0 if found == 0 else float("inf")
    return abs(found - expected) / abs(expected)


def largest_spread(values: Sequence[float]) -> float:
    """The difference of the largest and the smallest value, relative to the smallest."""
    return relative(max(values), min(values)) if values else 0.0


def differing_speeds(found: Evidence) -> tuple[float, float] | None:
    """Return the slowest and fastest repetition if they differ too much for either to be the recipe's speed."""
    speeds = [repeat.tokens_per_second_per_gpu for repeat in found.repeats if repeat.processor is None]
    known = [speed for speed in speeds if speed is not None]
    return (min(known), max(known)) if largest_spread(known) > _SPEED_MAY_SPREAD else None


def judged_tolerances(found: Evidence) -> dict[str, Tolerance]:
    """Return the tolerances of recorded evidence, without that of the speed if the repetitions differ too much."""
    is_judged = differing_speeds(found) is None
    return {key: tolerance for key, tolerance in found.tolerances.items() if key != SPEED or is_judged}


def why_slowed(results: Results) -> str | None:
    """Return why the speed of a run on a CPU is not that of the processor; None if it had its cores to itself."""
    share = results.core_wait_share
    if share is None:
        return "does not record how long it waited for a core"
    return f"waited for a core in {share:.0%} of its time, which other work had" if share > _MAY_WAIT else None


def compute_tolerances(
    runs: Sequence[Results], config: RunConfig, loss_floor: float | None = None
) -> dict[str, Tolerance]:
    """Compute the tolerances from repeated runs; from a single run, the floors.

    `loss_floor`: that of the configuration if None.
    """
    tolerances = _result_tolerances(runs, tolerance_of(config) if loss_floor is None else loss_floor)
    speeds = [results.tokens_per_second_per_gpu for results in runs]
    memories = [results.memory_gib for results in runs]
    for key, values, floor, may_spread, what in (
        (SPEED, speeds, _SPEED_FLOOR, _SPEED_MAY_SPREAD, "tokens per second and GPU"),
        (MEMORY, memories, _MEMORY_FLOOR, _MEMORY_MAY_SPREAD, "peak memory"),
    ):
        known = [value for value in values if value is not None]
        if len(known) == len(runs) and largest_spread(known) <= may_spread:
            spread = max((relative(one, other) for one, other in combinations(known, 2)), default=0.0)
            tolerances[key] = _tolerance(spread, floor, len(runs), what)
    return tolerances


def elsewhere_tolerances(runs: Sequence[Results], config: RunConfig, *, num_others: int) -> dict[str, Tolerance]:
    """Compute the tolerances of loss and scores for other processors, from runs of which `num_others` simulate one."""
    how = "on another processor" if num_others else "on another processor, which no run was on"
    return {
        key: tolerance.model_copy(update={"how": f"{how}: {tolerance.how}"})
        for key, tolerance in _result_tolerances(runs, tolerance_of(config), is_another_model=True).items()
    }


def _result_tolerances(
    runs: Sequence[Results], loss_floor: float, *, is_another_model: bool = False
) -> dict[str, Tolerance]:
    """Compute the tolerances of the loss and the scores.

    `is_another_model`: the compared run trains a model that answers other items right. Then the error of both scores
    counts, each as large as the largest of these runs.
    """
    tolerances = {
        LOSS: _tolerance(
            max((loss_difference(*pair) for pair in combinations(runs, 2)), default=0.0), loss_floor, len(runs),
            f"the loss averaged over {min(NUM_WINDOWS, len(runs[0].losses))} windows of steps",
        ),
    }  # fmt: skip
    for task, score in runs[0].scores.items():
        if all(task in results.scores for results in runs):
            reached = [results.scores[task].value for results in runs]
            stderr = score.stderr or 0.0
            if is_another_model:
                stderr = math.sqrt(2) * max(results.scores[task].stderr or 0.0 for results in runs)
            tolerances[score_key(task)] = _score_tolerance(max(reached) - min(reached), stderr, len(runs))
    return tolerances


def _tolerance(spread: float, floor: float, num_runs: int, what: str) -> Tolerance:
    how = f"{what}: {_spread(spread, num_runs)} at least {floor:g}"
    return Tolerance(value=float(f"{max(FACTOR * spread, floor):.3g}"), kind="relative", how=how)


def _score_tolerance(spread: float, stderr: float, num_runs: int) -> Tolerance:
    floor = _STDERRS * stderr
    how = f"{_spread(spread, num_runs)} at least {_STDERRS:g} standard errors ({stderr:.2g})"
    return Tolerance(value=float(f"{max(FACTOR * spread, floor):.3g}"), kind="absolute", how=how)


def _spread(spread: float, num_runs: int) -> str:
    if num_runs == 1:
        return "not repeated, so the floor for equal runs:"
    return f"{num_runs} runs differ by up to {spread:.2g}; {FACTOR:g} times that,"
