"""The tolerances that repeated runs support."""

from __future__ import annotations

from statistics import fmean

import pytest

from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.evidence.files import read_evidence
from tunebook.evidence.schema import Results
from tunebook.evidence.tolerances import MEMORY, SPEED, compute_tolerances, tolerance_of
from tunebook.plan.auto.resolve import resolve_auto

from .conftest import CPU, MakeRun, Record, curve, on_cpu


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


def test_other_processors_get_a_tolerance_of_their_own(make_run: MakeRun, record: Record) -> None:
    runs = [on_cpu(make_run), on_cpu(make_run), on_cpu(make_run, threads=1, scale=1.1, score=0.88)]
    found = read_evidence(record(*runs))
    apart = 0.1 * fmean(curve()[51:54]) / fmean(curve())
    assert {key: one.value for key, one in found.tolerances.items()} == {"loss": 1e-6, "score:words": 0.03}
    assert found.tolerances_elsewhere is not None
    assert set(found.tolerances_elsewhere) == {"loss", "score:words"}
    assert found.tolerances_elsewhere["loss"].value == pytest.approx(3 * apart, rel=1e-2)
    assert found.tolerances_elsewhere["score:words"].value == 0.06  # 3 times the difference of 0.9 and 0.88
    processors = [repeat.processor and repeat.processor.threads for repeat in found.repeats]
    assert (found.hardware.processor and found.hardware.processor.threads, processors) == (2, [None, None, 1])


def test_equal_runs_on_one_processor_leave_the_floor_for_others(make_run: MakeRun, record: Record) -> None:
    found = read_evidence(record(on_cpu(make_run), on_cpu(make_run)))
    assert found.tolerances_elsewhere is not None
    assert found.tolerances_elsewhere["loss"].value == 1e-5


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        ([], 1e-5),
        (["hardware=hopper", "precision=fp32"], 1e-4),
        (["hardware=hopper", "precision=bf16"], 2e-3),
        (["hardware=cpu", "precision=bf16"], 2e-3),
        (["hardware=hopper", "precision=fp8"], 1e-2),
    ],
)
def test_the_tolerance_follows_the_number_format(words: list[str], tolerance: float) -> None:
    assert tolerance_of(resolve_auto(compose("quickstart", words).config, CPU).config) == tolerance
