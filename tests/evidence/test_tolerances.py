"""The tolerances that repeated runs support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.config.frozen import plain_config
from tunebook.evidence.compare import Claim, Verdict, compare
from tunebook.evidence.files import content_hash
from tunebook.evidence.gather import read_finished
from tunebook.evidence.schema import Hardware, Results
from tunebook.evidence.tolerances import MEMORY, SPEED, compute_tolerances

from .conftest import MakeRun


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


def test_a_speed_that_cannot_be_judged_is_shown() -> None:
    runs = [results(1000.0), results(2500.0)]
    machine = Hardware(
        generation="hopper", gpu="NVIDIA H200", gpus=1, nodes=1, memory_gib=140.0, driver="580", nccl=None, cpus=8
    )
    claim = Claim(results=runs[0], hardware=machine, tolerances=compute_tolerances(runs, plain_config()))
    rows = {row.name: row for row in compare(claim, results(10.0), machine, is_split_equally=True)}
    assert rows["tokens/s/GPU"].verdict is Verdict.shown
    assert rows["tokens/s/GPU"].why == "the recorded runs differ too much to judge by"
    assert rows["memory GiB"].verdict is Verdict.same


def test_tolerance_of_scattered_speeds_is_ignored(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [make_run(gpus=1, speed=1000.0), make_run(gpus=1, speed=1010.0)]
    on_gpus = record_evidence([read_finished(run) for run in runs], "try", [])
    content = json.loads(on_gpus.read_text())
    content["repeats"][1]["tokens_per_second_per_gpu"] = 847.0
    content["tolerances"]["speed"]["value"] = 0.542  # as it was recorded once
    on_gpus.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    rows = {row.name: row for row in verify(read_finished(make_run(gpus=1, speed=10.0)), []).rows}
    assert rows["tokens/s/GPU"].verdict.value == "not judged"
    assert rows["tokens/s/GPU"].why == "the recorded runs differ too much to judge by"
    assert rows["memory GiB"].verdict.value == "within tolerance"
