"""What repeated runs support, and what is no tolerance any more."""

from __future__ import annotations

import pytest

from tunebook.config.plain import plain_config
from tunebook.evidence.compare import Claim, Verdict, compare
from tunebook.evidence.schema import Hardware, Results
from tunebook.evidence.tolerances import MEMORY, SPEED, work_out


def results(speed: float) -> Results:
    return Results(
        steps=[1, 2], losses=[2.0, 1.0], tokens_per_second_per_gpu=speed, memory_gib=10.0, planned_memory_gib=None,
        scores={},
    )  # fmt: skip


@pytest.mark.parametrize(("again", "expected"), [(1000.0, 0.05), (1050.0, 0.143), (1400.0, 0.857), (1600.0, None)])
def test_a_tolerance_of_speed_is_less_than_all_of_it(again: float, expected: float | None) -> None:
    """3 times what repetitions differ by; one that even a run at a standstill would keep is none."""
    found = work_out([results(1000.0), results(again)], plain_config())
    assert (found[SPEED].value if SPEED in found else None) == (pytest.approx(expected) if expected else None)
    assert found[MEMORY].value == 0.02


def test_a_speed_that_cannot_be_judged_is_shown() -> None:
    runs = [results(1000.0), results(2500.0)]
    machine = Hardware(
        generation="hopper", gpu="NVIDIA H200", gpus=1, nodes=1, memory_gib=140.0, driver="580", nccl=None, cpus=8
    )
    claim = Claim(results=runs[0], hardware=machine, tolerances=work_out(runs, plain_config()))
    rows = {row.name: row for row in compare(claim, results(10.0), machine, is_split_alike=True)}
    assert rows["tokens/s/GPU"].verdict is Verdict.shown
    assert rows["tokens/s/GPU"].why == "the recorded runs differ too much to judge by"
    assert rows["memory GiB"].verdict is Verdict.same
