"""The tolerances that repeated runs support."""

from __future__ import annotations

from statistics import fmean

import pytest

from tunebook.config.choices import Compute, Generation
from tunebook.config.frozen import plain_config
from tunebook.evidence.compare import Verdict
from tunebook.evidence.schema import Results, Score, read_evidence
from tunebook.evidence.tolerances import FIRST_LOSS, MEMORY, SPEED, compute_tolerances, loss_differences, tolerance_of

from .conftest import MakeRun, Record, curve, rows_of


def results(speed: float) -> Results:
    return Results(
        steps=[1, 2], losses=[2.0, 1.0], tokens_per_second_per_gpu=speed, memory_gib=10.0, planned_memory_gib=None,
        scores={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("again", "expected"), [(1000.0, 0.05), (1050.0, 0.143), (1100.0, 0.273), (900.0, None), (1600.0, None)]
)
def test_speeds_that_are_far_apart_support_no_tolerance(again: float, expected: float | None) -> None:
    """3 times the difference of the repetitions, up to a tenth of the slowest."""
    found = compute_tolerances([results(1000.0), results(again)], plain_config())
    assert (found[SPEED].value if SPEED in found else None) == (pytest.approx(expected) if expected else None)
    assert found[MEMORY].value == 0.02


def test_the_tolerance_is_three_times_what_repeated_runs_differ_by(make_run: MakeRun, record: Record) -> None:
    found = read_evidence(record(make_run(), make_run(losses=curve(1.02), score=0.94)))
    # The last 10 of 60 steps are 2% higher, and small: their windows of 3 steps count against the curve's mean.
    apart = 0.02 * fmean(curve()[51:54]) / fmean(curve())
    assert found.tolerances["loss"].value == pytest.approx(3 * apart, rel=0.05)
    assert found.tolerances["score:words"].value == pytest.approx(0.12, rel=1e-2)
    assert "the runs differ by up to 0.0023; 3 times that, at least 1e-05" in found.tolerances["loss"].how


def test_a_score_of_100_percent_may_differ_by_three_items() -> None:
    score = Score(metric="acc", value=1.0, stderr=0.0, num_items=100)
    found = compute_tolerances([results(1000.0).model_copy(update={"scores": {"words": score}})] * 2, plain_config())
    assert found["score:words"].value == pytest.approx(0.03)


def test_each_part_of_the_curve_has_its_own_tolerance(make_run: MakeRun, record: Record) -> None:
    """The recorded runs are equal for 50 of 60 steps: what is far from them there is another training."""
    record(make_run(), make_run(losses=curve(1.02)))
    early = [loss * 1.001 if step == 1 else loss for step, loss in enumerate(curve())]
    assert rows_of(make_run(losses=curve(1.03)))["loss"].verdict is Verdict.same
    row = rows_of(make_run(losses=early))["loss"]
    assert (row.verdict, row.tolerance) == (Verdict.different, 1e-5)
    assert "most in steps 1 to 3" in row.reason


def test_the_first_loss_is_judged_however_far_apart_equal_runs_move(make_run: MakeRun, record: Record) -> None:
    """No update is in it, so other data or masks show there."""
    apart = [loss * (1.0 if step == 0 else 2.0) for step, loss in enumerate(curve())]
    record(make_run(), make_run(losses=apart))
    masked = [loss * (1.001 if step == 0 else 1.0) for step, loss in enumerate(curve())]
    rows = rows_of(make_run(losses=masked))
    assert rows["loss"].verdict is Verdict.same
    assert (rows["first loss"].verdict, rows["first loss"].tolerance) == (Verdict.different, 1e-5)
    assert rows_of(make_run(losses=apart))["first loss"].verdict is Verdict.same


def test_the_first_loss_has_a_tolerance_if_it_was_logged_and_depends_on_the_data() -> None:
    """That of pairs is a constant until the model leaves its reference."""
    pairs = plain_config()
    pairs.method.name = "dpo"
    later = [results(1.0).model_copy(update={"steps": [10, 20]})]
    assert FIRST_LOSS in compute_tolerances([results(1.0)], plain_config())
    assert FIRST_LOSS not in compute_tolerances([results(1.0)], pairs)
    assert FIRST_LOSS not in compute_tolerances(later, plain_config())


def test_a_negative_loss_differs_by_its_size() -> None:
    """Some losses of pairs are negative, such as those of `robust`. The mean size of both curves is 2."""
    assert loss_differences([1.0, -3.2], [1.0, -3.0]) == [0.0, pytest.approx(0.2 / 3)]
    assert loss_differences([-1.2, -3.0], [-1.0, -3.0]) == [pytest.approx(0.1), 0.0]


@pytest.mark.parametrize(
    ("generation", "compute", "tolerance"),
    [("cpu", "fp32", 1e-5), ("hopper", "fp32", 1e-4), ("hopper", "bf16", 2e-3), ("cpu", "bf16", 2e-3),
     ("hopper", "fp8", 1e-2)],
)  # fmt: skip
def test_the_tolerance_follows_the_number_format(generation: str, compute: str, tolerance: float) -> None:
    config = plain_config()
    config.hardware.generation, config.precision.compute = Generation[generation], Compute[compute]
    assert tolerance_of(config) == tolerance
