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
from tunebook.evidence.gather import read_finished

from ..evidence.conftest import NUM_STEPS, MakeRun, Record, curve, verified


@pytest.fixture
def evidence(make_run: MakeRun, record: Record) -> Path:
    return record(make_run(), make_run())


def run_command(*runs: Path, **options: Any) -> tuple[int, str]:
    out = StringIO()
    words = [str(run) for run in runs]
    return verify_command(words, Path("outputs"), [], Console(file=out, width=300), **options), out.getvalue()


def test_exit_code_is_0_or_5_and_the_table_is_printed_once(evidence: Path, make_run: MakeRun) -> None:
    code, said = run_command(make_run())
    assert (code, said.splitlines()[-1]) == (0, "the run agrees with cpu-1-try.json")
    code, said = run_command(make_run(losses=curve(1.3)))
    assert (code, said.splitlines()[-1]) == (5, "the run DIFFERS from cpu-1-try.json")
    assert said.count("DIFFERENT") == 1


def test_as_json_it_names_file_verdict_and_numbers(
    evidence: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run_command(make_run(score=0.1), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (code, printed["agrees"], printed["claim"]) == (5, False, evidence.name)
    assert printed["what"].startswith("from-scratch evidence, recorded on ")
    assert {row["name"]: row["verdict"] for row in printed["rows"]}["words"] == "DIFFERENT"


@pytest.mark.parametrize("options", [{"label": "x"}, {"record": True, "label": "x", "against": Path("y")}])
def test_options_that_exclude_each_other_are_refused(make_run: MakeRun, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="--label") as error:
        run_command(make_run(), **options)
    assert error.value.problem_id == "evidence-label"


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


@pytest.mark.parametrize("problem_id", ["no-evidence", "evidence-without-recipe"])
def test_a_run_without_evidence_is_refused(make_run: MakeRun, card: Path, problem_id: str) -> None:
    run = read_finished(make_run())
    if problem_id == "evidence-without-recipe":
        run.config.recipe = None
    with pytest.raises(RequestError) as error:
        find_claim(run, [], None)
    assert error.value.problem_id == problem_id


def test_a_named_file_is_taken(evidence: Path, make_run: MakeRun, project_root: Path, tmp_path: Path) -> None:
    moved = evidence.rename(tmp_path / "sent.json")
    assert run_command(make_run(), against=moved)[0] == 0
    with pytest.raises(DataError, match="does not exist"):
        run_command(make_run(), against=evidence)
    with pytest.raises(RequestError, match="of other settings than"):
        run_command(make_run(), against=project_root / "recipes/zero1_lora/evidence/hopper-4-random_weights.json")


def test_a_typed_target_replaces_the_recorded_one(make_run: MakeRun, record: Record) -> None:
    record(make_run(), make_run(), target="words:exact_match>=0.9")
    code, said = run_command(make_run(), target="words:exact_match>=0.85@60")
    assert (code, "target: words:exact_match >= 0.85 within 60 steps" in said) == (0, True)
    assert "recorded: reached" not in said  # the recorded runs had another target
    code, said = run_command(make_run(), target="loss<=0.01")
    assert (code, "MISSED" in said) == (5, True)


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


def test_evidence_needs_two_trainings(make_run: MakeRun, record: Record, card: Path, tmp_path: Path) -> None:
    one = make_run()
    copy = shutil.copytree(one, tmp_path / "copy")
    for runs in ((one,), (one, one), (one, copy)):
        assert refused(record, *runs)[0] == "evidence-not-repeated"
    assert not (card.parent / "evidence").exists()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"replaced": {"row_length: 1024": "row_length: 512"}}, "packing.row_length is 512, recorded with 1024"),
        ({"replaced": {"weight_decay: 0.1": "weight_decay: 0.2"}}, "optimizer.weight_decay is 0.2"),
        ({"manifest": {"environment": {"python": "3.9.0"}}}, "python is 3.9.0, recorded with 3."),
        ({"manifest": {"code": {"git_commit": "b" * 40}}}, "git_commit is bbbb"),
        ({"gpus": 1}, "gpu is NVIDIA H200, recorded with None"),
    ],
)
def test_a_run_of_something_else_is_no_repetition(
    make_run: MakeRun, record: Record, other: dict[str, Any], said: str
) -> None:
    problem_id, message = refused(record, make_run(), make_run(**other))
    assert (problem_id, said in message) == ("evidence-not-repeated", True)


@pytest.mark.parametrize(
    "code", [{"is_clean": False, "git_diff_sha256": "f" * 64}, {"git_commit": None, "is_clean": None, "reason": "none"}]
)
def test_uncommitted_code_is_refused(make_run: MakeRun, record: Record, code: dict[str, Any]) -> None:
    assert refused(record, make_run(), make_run(manifest={"code": code}))[0] == "evidence-of-changed-code"


@pytest.mark.parametrize("losses", [[*curve()[:-1], None], [6.0, None, 4.0]])
def test_a_run_without_the_loss_of_every_step_is_refused(
    make_run: MakeRun, record: Record, losses: list[float | None]
) -> None:
    problem_id, message = refused(record, *(make_run(losses=losses) for _ in range(2)))
    step = losses.index(None) + 1
    assert (problem_id, f"no finite loss of step {step}" in message) == ("evidence-not-repeated", True)


@pytest.mark.parametrize(
    ("target", "said"),
    [("loss<=0.001", "its best value is 0.1"), ("words:exact_match>=0.85", "its best value is 0.8"),
     ("wordz:exact_match>=0.5", "its best value is None")],
)  # fmt: skip
def test_a_target_that_one_run_missed_is_refused(make_run: MakeRun, record: Record, target: str, said: str) -> None:
    problem_id, message = refused(record, make_run(), make_run(score=0.8), target=target)
    assert (problem_id, said in message) == ("evidence-target", True)


def test_a_recorded_claim_is_not_overwritten(evidence: Path, make_run: MakeRun, record: Record) -> None:
    before = evidence.read_bytes()
    assert refused(record, make_run(), make_run())[0] == "evidence-exists"
    assert evidence.read_bytes() == before


@pytest.mark.parametrize("label", ["../x", "Big"])
def test_a_label_is_part_of_a_files_name(make_run: MakeRun, record: Record, label: str) -> None:
    assert refused(record, make_run(), make_run(), label=label)[0] == "evidence-label"
