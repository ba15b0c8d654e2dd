"""`tunebook verify`: which evidence a run is compared with, the output, and what is recorded or refused as evidence."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.verify import find_claim, verify_command
from tunebook.errors import DataError, RequestError
from tunebook.evidence.compare import Verdict
from tunebook.evidence.gather import read_finished

from ..evidence.conftest import NUM_STEPS, MakeRun, Record, curve, verified


@pytest.fixture
def evidence(make_run: MakeRun, record: Record) -> Path:
    return record(make_run(), make_run())


def run_command(*runs: Path, **options: Any) -> tuple[int, str]:
    out = StringIO()
    words = [str(run) for run in runs]
    return verify_command(words, Path("outputs"), [], Console(file=out, width=300), **options), out.getvalue()


def test_a_run_agrees_or_differs(evidence: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(make_run())[0] == 0
    code, text = run_command(make_run(losses=curve(1.3)))
    assert (code, text.count("DIFFERENT")) == (5, 1)
    code, _ = run_command(make_run(score=0.1), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (code, printed["agrees"], printed["claim"]) == (5, False, evidence.name)
    assert {row["name"]: row["verdict"] for row in printed["rows"]}["words"] == "DIFFERENT"


# --- which evidence


def test_evidence_of_the_same_machine_and_then_of_the_same_split_is_taken(make_run: MakeRun, record: Record) -> None:
    split = {"row_length: 1024": "row_length: 512"}
    record(make_run(), make_run(), label="a")
    record(*(make_run(gpus=1, replaced=split) for _ in range(2)), label="b")
    record(*(make_run(gpus=1) for _ in range(2)), label="c")
    assert verified(make_run()).claim.name == "cpu-1-a.json"
    assert verified(make_run(gpus=1, replaced=split)).claim.name == "hopper-1-b.json"
    assert verified(make_run(gpus=1)).claim.name == "hopper-1-c.json"


def test_a_run_of_other_settings_is_refused_with_the_settings_that_differ(evidence: Path, make_run: MakeRun) -> None:
    other = make_run("optimizer.learning_rate=3e-4", "training.seed=7")
    with pytest.raises(RequestError, match=r"optimizer\.learning_rate is 0\.0003, recorded with 0\.0012") as error:
        run_command(other)
    assert error.value.problem_id == "evidence-of-other-config"
    assert f"tunebook reproduce {evidence}" in error.value.message


def test_other_data_under_the_same_settings_is_a_difference(evidence: Path, make_run: MakeRun) -> None:
    found = verified(make_run(manifest={"dataset": {"content_sha256": "9"}}))
    assert (found.rows[0].name, found.rows[0].verdict, found.exit_code) == ("inputs", Verdict.different, 5)
    assert "data_sha256 is 9, recorded with " in found.rows[0].reason


def test_evidence_of_the_same_settings_is_nearer_than_any_other(make_run: MakeRun, record: Record) -> None:
    """Here "a" has the run's data and one other setting."""
    other_data = {"dataset": {"content_sha256": "9"}}
    record(*(make_run("optimizer.learning_rate=3e-4", manifest=other_data) for _ in range(2)), label="a")
    record(make_run(), make_run(), label="b")
    assert verified(make_run(manifest=other_data)).claim.name == "cpu-1-b.json"


def test_a_run_without_evidence_is_refused(make_run: MakeRun, card: Path) -> None:
    run = read_finished(make_run())
    for problem_id in ("no-evidence", "evidence-without-recipe"):
        with pytest.raises(RequestError) as error:
            find_claim(run, [], None)
        assert error.value.problem_id == problem_id
        run.config.recipe = None


def test_a_named_file_is_taken(evidence: Path, make_run: MakeRun, project_root: Path, tmp_path: Path) -> None:
    moved = evidence.rename(tmp_path / "sent.json")
    assert run_command(make_run(), against=moved)[0] == 0
    with pytest.raises(DataError, match="does not exist"):
        run_command(make_run(), against=evidence)
    with pytest.raises(RequestError, match="the nearest evidence"):
        run_command(make_run(), against=project_root / "recipes/zero1_lora/evidence/hopper-4-random_weights.json")


def test_a_typed_target_replaces_the_recorded_one(make_run: MakeRun, record: Record) -> None:
    record(make_run(), make_run(), target="words:exact_match>=0.9")
    code, text = run_command(make_run(), target="words:exact_match>=0.85@60")
    assert (code, "target: words:exact_match >= 0.85 within 60 steps" in text) == (0, True)
    assert "recorded: reached" not in text  # the recorded runs had another target
    code, text = run_command(make_run(), target="loss<=0.01")
    assert (code, "MISSED" in text) == (5, True)


# --- recorded


def test_evidence_says_first_what_ran_and_when_each_run_reached_the_target(make_run: MakeRun, record: Record) -> None:
    runs = [make_run("launcher=local", validation={30: loss, 60: 2.0}) for loss in (3.0, 2.4)]
    content = json.loads(record(*runs, target="validation_loss<=2.5@60").read_text())
    assert list(content)[:3] == ["format", "ran", "hardware"]
    assert content["ran"] == {
        "recipe": "quickstart", "title": "A small model learns word tasks from scratch on a CPU", "weights": "random",
        "data": "real", "layers": "all 2", "steps": NUM_STEPS, "overrides": ["launcher=local"],
    }  # fmt: skip
    assert content["target"] == {
        "metric": "validation_loss", "task": None, "value": 2.5, "direction": "at_most", "max_steps": 60,
    }  # fmt: skip
    assert [repeat["steps_to_target"] for repeat in content["repeats"]] == [60, 30]
    assert [repeat["time_to_target_s"] for repeat in content["repeats"]] == [6.0, pytest.approx(30 * 0.101)]


def refused(record: Record, *runs: Path, **options: Any) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as error:
        record(*runs, **options)
    return error.value.problem_id, error.value.message


def test_evidence_needs_two_trainings_and_is_not_overwritten(
    make_run: MakeRun, record: Record, card: Path, tmp_path: Path
) -> None:
    first, second = make_run(), make_run()
    copy = shutil.copytree(first, tmp_path / "copy")
    for runs in ((first,), (first, first), (first, copy)):
        assert refused(record, *runs)[0] == "evidence-not-repeated"
    for label in ("../x", "Big"):
        assert refused(record, first, second, label=label)[0] == "evidence-label"
    with pytest.raises(RequestError) as error:
        run_command(first, label="x")
    assert error.value.problem_id == "evidence-label"
    assert not (card.parent / "evidence").exists()
    before = record(first, second)
    content = before.read_bytes()
    assert refused(record, first, second)[0] == "evidence-exists"
    assert before.read_bytes() == content


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"replaced": {"row_length: 1024": "row_length: 512"}}, "packing.row_length"),
        ({"manifest": {"environment": {"python": "3.9.0"}}}, "python"),
        ({"manifest": {"code": {"git_commit": "b" * 40}}}, "git_commit"),
        ({"gpus": 1}, "gpu"),
        ({"losses": [*curve()[:-1], None]}, f"step {NUM_STEPS}"),
    ],
)
def test_a_run_of_something_else_or_without_a_loss_is_no_repetition(
    make_run: MakeRun, record: Record, changes: dict[str, Any], key: str
) -> None:
    problem_id, message = refused(record, make_run(), make_run(**changes))
    assert (problem_id, key in message) == ("evidence-not-repeated", True)


@pytest.mark.parametrize(
    "code", [{"is_clean": False, "git_diff_sha256": "f" * 64}, {"git_commit": None, "is_clean": None, "reason": "none"}]
)
def test_uncommitted_code_is_refused(make_run: MakeRun, record: Record, code: dict[str, Any]) -> None:
    assert refused(record, make_run(), make_run(manifest={"code": code}))[0] == "evidence-of-changed-code"


def test_a_target_that_one_run_missed_is_refused(make_run: MakeRun, record: Record) -> None:
    runs = make_run(), make_run(score=0.8)
    for target in ("loss<=0.001", "words:exact_match>=0.85", "wordz:exact_match>=0.5"):
        assert refused(record, *runs, target=target)[0] == "evidence-target"
