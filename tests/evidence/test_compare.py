"""The comparison of a run with evidence or with another run: what is judged, by which tolerance, and the verdicts."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.evidence.compare import (
    Comparison,
    Verdict,
    claim_of_run,
    compare,
    content_differences,
    setting_differences,
)
from tunebook.evidence.gather import read_finished
from tunebook.evidence.schema import Inputs

from .conftest import MakeRun, Record, curve, edit_json, rows_of, verified

EARLIER = [{"state": "running", "exit_code": None, "reason": None, "started": "x", "ended": None, "seconds": None}]
FIRST, LOSS, SPEED, MEMORY, SCORE = "first loss", "loss", "tokens/s/GPU", "memory GiB", "words"


@pytest.fixture
def evidence(make_run: MakeRun, record: Record) -> Path:
    return record(make_run(), make_run())


@pytest.fixture
def on_gpus(make_run: MakeRun, record: Record) -> Path:
    return record(make_run(gpus=1, speed=1000.0), make_run(gpus=1, speed=1010.0))


def between(first: Path, second: Path) -> Comparison:
    return compare(claim_of_run(read_finished(first)), read_finished(second))


def relog(run: Path, steps: list[int], first: int = 0) -> Path:
    """Log only these steps, each with the steps since the previous one; the first with those since `first`."""
    lines = [
        {"step": step, "num_steps": step - before, "loss": curve()[step - 1], "seconds": 0.1}
        for before, step in zip([first, *steps], steps, strict=False)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_an_equal_run_agrees_and_a_cpus_speed_and_memory_are_only_shown(evidence: Path, make_run: MakeRun) -> None:
    rows = rows_of(make_run(speed=10.0, memory=50.0))
    assert {name: row.verdict for name, row in rows.items()} == {
        FIRST: Verdict.same, LOSS: Verdict.same, SPEED: Verdict.shown, MEMORY: Verdict.shown, SCORE: Verdict.same,
    }  # fmt: skip
    assert rows[SPEED].reason == "on a CPU"
    assert rows[LOSS].reason.startswith("equal to the last bit")


def test_a_terminal_of_80_columns_cuts_no_name_and_no_reason(evidence: Path, make_run: MakeRun) -> None:
    console = Console(file=StringIO(), width=80, record=True)
    assert verified(make_run()).print(console) == 0
    lines = console.export_text().splitlines()
    assert any(line.startswith(f"{SPEED} ") and line.rstrip().endswith("not judged") for line in lines)
    assert f"{SPEED}: on a CPU" in [line.rstrip() for line in lines]


@pytest.mark.parametrize(("scale", "verdict"), [(1 + 5e-5, Verdict.same), (1 + 5e-4, Verdict.different)])
def test_a_loss_that_leaves_the_tolerance_differs(
    evidence: Path, make_run: MakeRun, scale: float, verdict: Verdict
) -> None:
    row = rows_of(make_run(losses=curve(scale)))[LOSS]
    assert (row.verdict, row.reason.partition(";")[0]) == (verdict, "differs from step 51")


def test_a_score_may_be_three_standard_errors_off(evidence: Path, make_run: MakeRun) -> None:
    assert rows_of(make_run(score=0.872))[SCORE].verdict is Verdict.same
    assert rows_of(make_run(score=0.868))[SCORE].verdict is Verdict.different


@pytest.mark.parametrize(
    ("recorded", "measured", "reason"),
    [
        ('"num_items": 256', '"num_items": 255', "num_items is 255, recorded with 256"),
        ("of the 256", "of others", "items_sha256 is of others, recorded with of the 256"),
    ],
)
def test_a_score_of_other_items_is_a_difference(
    evidence: Path, make_run: MakeRun, recorded: str, measured: str, reason: str
) -> None:
    """As of another file of held-out conversations, whose name is the same."""
    run = make_run()
    file = run / "evaluation" / "after.json"
    file.write_text(file.read_text().replace(recorded, measured))
    row = rows_of(run)[SCORE]
    assert (row.verdict, row.reason) == (Verdict.different, reason)


@pytest.mark.parametrize(("numbers", "name"), [({"speed": 900.0}, SPEED), ({"memory": 2.1}, MEMORY)])
def test_on_the_same_gpus_speed_and_memory_are_judged(
    on_gpus: Path, make_run: MakeRun, numbers: dict[str, float], name: str
) -> None:
    assert rows_of(make_run(gpus=1))[name].verdict is Verdict.same
    assert rows_of(make_run(gpus=1, **numbers))[name].verdict is Verdict.different


def test_on_other_hardware_only_loss_and_score_are_judged(on_gpus: Path, make_run: MakeRun) -> None:
    rows = rows_of(make_run(speed=1.0, memory=9.0, losses=curve(1.5)))
    assert [rows[name].verdict for name in (LOSS, SPEED, MEMORY, SCORE)] == [
        Verdict.different, Verdict.shown, Verdict.shown, Verdict.same,
    ]  # fmt: skip
    assert "hardware.gpu is None" in rows[SPEED].reason


@pytest.mark.parametrize(
    "replaced",
    [{"row_length: 1024": "row_length: 512"}, {"compile_layers: false": "compile_layers: true"}],
    ids=["rows", "kernels"],
)
def test_a_step_that_is_split_in_another_way_has_the_same_loss_but_no_comparable_speed(
    on_gpus: Path, make_run: MakeRun, replaced: dict[str, str]
) -> None:
    rows = rows_of(make_run(gpus=1, speed=1.0, replaced=replaced))
    assert (rows[LOSS].verdict, rows[SPEED].verdict) == (Verdict.same, Verdict.shown)


@pytest.mark.parametrize(("words", "is_said"), [([], False), (["packing.row_length=512"], True)])
def test_the_dropout_of_another_split_is_named(words: list[str], is_said: bool, make_run: MakeRun) -> None:
    first, second = make_run("peft=lora"), make_run("peft=lora", *words, losses=curve(1.1))
    (row,) = [row for row in between(first, second).rows if row.name == LOSS]
    assert (row.verdict, "peft.dropout=0.05" in row.reason) == (Verdict.different, is_said)


def test_a_speed_whose_repetitions_are_far_apart_is_shown(make_run: MakeRun, record: Record) -> None:
    record(make_run(gpus=1, speed=1000.0), make_run(gpus=1, speed=2500.0))
    rows = rows_of(make_run(gpus=1, speed=10.0))
    assert (rows[SPEED].verdict, rows[SPEED].reason) == (Verdict.shown, "the recorded runs differ too much")
    assert rows[MEMORY].verdict is Verdict.same


def test_other_packages_are_named_and_not_judged(evidence: Path, make_run: MakeRun) -> None:
    found = verified(make_run(manifest={"environment": {"packages": {"torch": "0.1"}}}))
    assert (found.rows[-1].name, found.rows[-1].verdict, found.exit_code) == ("packages", Verdict.shown, 0)
    assert "packages.accelerate is None, recorded with " in found.rows[-1].reason


def test_a_single_run_is_compared_by_the_floors(make_run: MakeRun) -> None:
    original = make_run(gpus=1, validation={60: 2.0})
    found = between(original, make_run(gpus=1, speed=960.0, validation={60: 2.0}))
    assert (found.exit_code, found.claim.tolerances["loss"].value) == (0, 1e-4)  # fp32 on a GPU
    worse = between(original, make_run(gpus=1, speed=940.0, validation={60: 2.1}))
    assert {row.name for row in worse.rows if row.verdict is Verdict.different} == {SPEED, "validation loss"}


def test_a_run_that_was_killed_is_compared_at_the_steps_that_it_has(make_run: MakeRun) -> None:
    whole, killed = (make_run("training.log_every_steps=10") for _ in range(2))
    relog(whole, [10, 20, 30, 40, 50, 60])
    edit_json(relog(killed, [10, 20, 40, 50, 60]) / "manifest.json", earlier_attempts=EARLIER)
    text = (killed / "metrics.jsonl").read_text().replace('"num_steps": 20', '"num_steps": 10')
    (killed / "metrics.jsonl").write_text(text)
    for claim, found in ((whole, killed), (killed, whole)):
        row = between(claim, found).rows[0]
        assert (row.verdict, row.difference) == (Verdict.same, 0.0)
        assert row.reason.startswith("steps that only one run logged: 30; ")


@pytest.mark.parametrize("num_kills", [0, 1])
def test_more_missing_steps_than_kills_are_a_difference(make_run: MakeRun, num_kills: int) -> None:
    other = relog(make_run(), [*range(3, 61)], first=2)
    edit_json(other / "manifest.json", earlier_attempts=EARLIER * num_kills)
    found = between(make_run(), other)
    assert (found.exit_code, found.rows[0].reason) == (5, "steps that only one run logged: 1, 2")


def test_another_validation_loss_is_a_difference(make_run: MakeRun, record: Record) -> None:
    record(*(make_run(validation={30: 3.0, 60: 2.45}) for _ in range(2)))
    found = verified(make_run(validation={30: 3.0, 60: 2.5}))
    row = next(row for row in found.rows if row.name == "validation loss")
    assert (row.expected, row.measured, row.verdict, found.exit_code) == (2.45, 2.5, Verdict.different, 5)


def test_a_number_that_only_the_second_run_has_is_shown(make_run: MakeRun) -> None:
    first = make_run()
    (first / "evaluation" / "after.json").unlink()
    found = between(first, make_run(validation={60: 2.45}))
    rows = {row.name: (row.expected, row.measured, row.verdict) for row in found.rows}
    assert rows["validation loss"] == (None, 2.45, Verdict.shown)
    assert rows[SCORE] == (None, 0.9, Verdict.shown)
    assert found.exit_code == 0


def test_a_target_is_reached_or_missed(make_run: MakeRun, record: Record) -> None:
    record(*(make_run(validation={30: 3.0, 60: 2.45}) for _ in range(2)), target="validation_loss<=2.5@60")
    found = verified(make_run(validation={30: 2.6, 60: 2.45}))
    row = found.rows[-1]
    assert (row.name, row.expected, row.measured) == ("target: validation_loss <= 2.5 within 60 steps", 2.5, 2.45)
    assert (row.verdict, found.exit_code) == (Verdict.reached, 0)
    assert row.reason.startswith(
        "reached at step 60, after 6.1 s of training; recorded: reached at step 60, after 6 to "
    )
    missed = verified(make_run(validation={60: 2.51}))
    assert (missed.rows[-1].verdict, missed.rows[-1].measured, missed.exit_code) == (Verdict.missed, 2.51, 5)
    assert verified(make_run()).rows[-1].verdict is Verdict.missed  # without a validation
    late = verified(make_run(validation={61: 2.4}))
    assert late.rows[-1].reason.startswith("the run does not measure it in these steps")


# --- the inputs of two runs


def keys(first: Inputs, second: Inputs) -> list[str]:
    return [key for key, _, _ in (*setting_differences(first, second), *content_differences(first, second))]


def test_settings_and_data_are_compared_and_the_split_is_not(make_run: MakeRun) -> None:
    run = read_finished(make_run()).inputs
    assert keys(run, read_finished(make_run("training.micro_batch_size=4", "dataset.num_documents=9")).inputs) == []
    assert keys(run, read_finished(make_run("training.seed=7")).inputs) == ["training.seed", "seed"]
    assert keys(run, run.model_copy(update={"data_sha256": "9"})) == ["data_sha256"]
    assert keys(run, run.model_copy(update={"data_fingerprint": "9"})) == []  # prepared by other code


@pytest.mark.parametrize(
    ("key", "fingerprint", "expected"),
    [("data_sha256", "a", []), ("data_sha256", None, ["path"]), ("weights_fingerprint", "a", []),
     ("weights_fingerprint", None, ["path"])],
)  # fmt: skip
def test_a_path_counts_where_the_hash_of_its_content_is_unknown(
    make_run: MakeRun, key: str, fingerprint: str | None, expected: list[str]
) -> None:
    inputs, section = read_finished(make_run()).inputs, "dataset" if key == "data_sha256" else "model"

    def moved(path: str) -> Inputs:
        config = inputs.config | {section: inputs.config[section] | {"path": path}}
        return inputs.model_copy(update={"config": config, key: fingerprint})

    assert keys(moved("/here"), moved("/there")) == [f"{section}.{name}" for name in expected]
    if fingerprint is not None:
        assert keys(moved("/here"), moved("/here").model_copy(update={key: "b"})) == [key]
