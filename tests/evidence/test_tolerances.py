"""The tolerances that repeated runs support."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.errors import RequestError
from tunebook.evidence.compare import Row, Verdict
from tunebook.evidence.files import content_hash, read_evidence
from tunebook.evidence.gather import RunFacts, read_finished
from tunebook.evidence.schema import Results
from tunebook.evidence.target import parse_target, recorded_text
from tunebook.evidence.tolerances import MEMORY, SPEED, compute_tolerances, tolerance_of
from tunebook.evidence.verifying import claim_of_run, compare_run
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto

from .conftest import EPYC, MakeRun, curve


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


def test_a_speed_that_cannot_be_judged_is_shown(make_run: MakeRun, recipes_dir: Path) -> None:
    record_evidence([read_finished(make_run(gpus=1, speed=speed)) for speed in (1000.0, 2500.0)], "try", [])
    rows = rows_of(read_finished(make_run(gpus=1, speed=10.0)))
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


# --- on a CPU with a known processor


def on(make_run: MakeRun, *words: str, scale: float = 1.0, **numbers: Any) -> RunFacts:
    """A run on a CPU; `numbers` may replace keys of its processor."""
    processor = EPYC | {key: numbers.pop(key) for key in list(numbers) if key in EPYC}
    manifest = {"processor": processor} | numbers.pop("manifest", {})
    return read_finished(make_run(*words, losses=curve(scale), manifest=manifest, **numbers))


@pytest.fixture
def on_epyc(make_run: MakeRun, recipes_dir: Path) -> Path:
    """Two equal runs, and one that another processor could have made, with its last steps 10% higher."""
    same = [on(make_run, speed=speed) for speed in (1000.0, 1010.0)]
    return record_evidence([*same, on(make_run, threads=1, scale=1.1, score=0.88, speed=500.0)], "try", [])


def rows_of(run: RunFacts) -> dict[str, Row]:
    return {row.name: row for row in verify(run, []).rows}


def test_the_same_processor_is_held_to_the_same_losses_and_others_to_the_measured_spread(on_epyc: Path) -> None:
    found = read_evidence(on_epyc)
    # The last 10 of 60 steps are 10% higher, and small: their windows of 3 steps count against the curve's mean.
    apart = 0.1 * fmean(curve()[51:54]) / fmean(curve())
    assert (found.tolerances["loss"].value, found.tolerances["score:words"].value) == (1e-6, 0.03)
    assert found.tolerances["speed"].value == 0.05
    assert found.tolerances_elsewhere is not None
    assert set(found.tolerances_elsewhere) == {"loss", "score:words"}
    assert found.tolerances_elsewhere["loss"].value == pytest.approx(3 * apart, rel=1e-2)
    assert found.tolerances_elsewhere["score:words"].value == 0.06  # 3 times the difference of 0.9 and 0.88
    processors = [repeat.processor and repeat.processor.threads for repeat in found.repeats]
    assert (found.hardware.processor and found.hardware.processor.threads, processors) == (2, [None, None, 1])


def test_on_the_same_processor_loss_and_speed_are_judged(on_epyc: Path, make_run: MakeRun) -> None:
    rows = rows_of(on(make_run, speed=960.0, memory=9.0))
    assert [row.verdict.value for row in rows.values()] == [
        "within tolerance", "within tolerance", "not judged", "within tolerance",
    ]  # fmt: skip
    assert rows["memory GiB"].why == "a CPU's memory is that of the whole process, with its libraries"
    assert rows_of(on(make_run, speed=940.0))["tokens/s/GPU"].verdict is Verdict.different
    with_target = verify(on(make_run, speed=940.0), [], target=parse_target("loss<=3")).rows
    assert (with_target[1].verdict, with_target[-1].verdict) == (Verdict.different, Verdict.reached)
    rows = rows_of(on(make_run, scale=1 + 1e-4))
    assert (rows["loss"].verdict, rows["loss"].tolerance) == (Verdict.different, 1e-6)


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"name": "Xeon"}, "another processor: Xeon, recorded on AMD EPYC, family 25, model 1"),
        ({"instructions": "AVX512"}, "another instruction set: AVX512, recorded on AVX2"),
        ({"threads": 8}, "another number of threads: 8, recorded on 2"),
        ({"manifest": {"hardware": {"cpus": 8}}}, "another number of cores: 8, recorded on 2"),
        ({"replaced": {"row_length: 1024": "row_length: 512"}}, "the step is split differently"),
    ],
)
def test_elsewhere_the_measured_tolerance_applies_and_speed_is_shown(
    on_epyc: Path, make_run: MakeRun, numbers: dict[str, Any], why: str
) -> None:
    rows = rows_of(on(make_run, scale=1.1, speed=1.0, score=0.85, **numbers))
    assert rows["loss"].verdict is Verdict.same
    assert rows["loss"].why.startswith(f"{why}; on another processor: the loss averaged over 20 windows")
    assert (rows["tokens/s/GPU"].verdict, rows["tokens/s/GPU"].why) == (Verdict.shown, why)
    assert rows["words"].verdict is Verdict.same
    assert rows_of(on(make_run, scale=1.5, **numbers))["loss"].verdict is Verdict.different


def test_a_run_on_the_cpu_of_a_machine_with_gpus_is_one_on_a_cpu(on_epyc: Path, make_run: MakeRun) -> None:
    rows = rows_of(on(make_run, "hardware=cpu", gpus=1, speed=960.0))
    assert [rows[name].verdict for name in ("loss", "tokens/s/GPU")] == [Verdict.same, Verdict.same]


def test_other_packages_compute_in_another_order(on_epyc: Path, make_run: MakeRun) -> None:
    versions = json.loads(on_epyc.read_text())["software"]["packages"] | {"torch": "2.12.0"}
    rows = rows_of(on(make_run, scale=1.1, manifest={"environment": {"packages": versions}}))
    assert rows["loss"].why.startswith("other packages: torch; on another processor")
    assert rows["loss"].verdict is Verdict.same


def test_a_run_without_a_recorded_processor_may_differ_as_another(on_epyc: Path, make_run: MakeRun) -> None:
    rows = rows_of(read_finished(make_run(losses=curve(1.1))))
    assert rows["loss"].why.startswith("a CPU: the run does not record its processor; ")
    assert rows["loss"].verdict is Verdict.same


def test_equal_runs_on_one_processor_leave_the_floor_for_others(make_run: MakeRun, recipes_dir: Path) -> None:
    found = read_evidence(record_evidence([on(make_run), on(make_run)], "try", []))
    assert found.tolerances_elsewhere is not None
    assert found.tolerances_elsewhere["loss"].value == 1e-5
    assert found.tolerances_elsewhere["score:words"].value == 0.0424  # 3 errors of a difference: 3 x sqrt(2) x 0.01
    assert found.tolerances_elsewhere["loss"].how.startswith("on another processor, which no run was on: the loss")


def test_the_time_to_a_target_is_that_of_the_first_processor(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [on(make_run), on(make_run), on(make_run, threads=1, scale=5.0)]
    found = read_evidence(record_evidence(runs, "try", [], parse_target("loss<=3")))
    steps = [repeat.steps_to_target for repeat in found.repeats]
    assert steps == [9, 9, 9]  # the windows of 3 steps have means of 5.52, 4.05 and 2.98
    assert recorded_text(found.repeats) == "reached at step 9, after 0.9 to 0.91 s of training"


def test_the_first_processor_needs_two_runs(make_run: MakeRun, recipes_dir: Path) -> None:
    with pytest.raises(RequestError, match="ran with its processor, instructions and threads: name another") as error:
        record_evidence([on(make_run, threads=1), on(make_run), on(make_run)], "try", [])
    assert error.value.problem_id == "evidence-not-repeated"


def test_a_single_run_does_not_show_the_speed_of_a_cpu(make_run: MakeRun) -> None:
    found = compare_run(claim_of_run(on(make_run), []), on(make_run, speed=1.0))
    (row,) = [row for row in found.rows if row.name == "tokens/s/GPU"]
    assert (row.verdict, row.why) == (Verdict.shown, "only repeated runs show the speed of a CPU")
    assert found.rows[0].tolerance == 1e-5


@pytest.mark.parametrize(
    ("waited", "said"),
    [
        (0.004, None),
        (0.05, r"waited for a core in 4\d% of its time, which other work had"),
        (None, "does not record how long it waited for a core"),
    ],
)
def test_the_speed_of_a_cpu_that_did_other_work_is_not_judged(
    on_epyc: Path, make_run: MakeRun, waited: float | None, said: str | None
) -> None:
    """Each step of the made-up runs takes 0.1 s."""
    row = rows_of(on(make_run, speed=500.0, waited=waited))["tokens/s/GPU"]
    assert row.verdict is (Verdict.different if said is None else Verdict.shown)
    assert said is None or re.fullmatch(f"this run {said}", row.why)
    on_epyc.unlink()
    found = read_evidence(record_evidence([on(make_run, waited=waited) for _ in range(2)], "try", []))
    assert (SPEED in found.tolerances) == (said is None)
    row = rows_of(on(make_run))["tokens/s/GPU"]
    assert row.verdict is (Verdict.same if said is None else Verdict.shown)
    assert said is None or re.fullmatch(f"the recorded run {said}", row.why)


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
    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    assert tolerance_of(resolve_auto(compose("quickstart", words).config, machine).config) == tolerance
