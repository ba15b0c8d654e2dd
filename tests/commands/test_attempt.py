"""What an attempt says of ranks that could not say themselves how they ended."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from tunebook.commands import attempt
from tunebook.commands.attempt import Attempt
from tunebook.config.choices import Contamination, Generation, LauncherName
from tunebook.config.frozen import plain_config
from tunebook.config.launchers import RayConfig
from tunebook.config.schema import DatasetConfig, EvaluationConfig, HardwareConfig
from tunebook.errors import StoppedError, TunebookError
from tunebook.launch.supervise import ProcessEnd, StopRequests
from tunebook.record.run_folder import FINISHED, RUN_FILE


@pytest.fixture
def make(tmp_path, monkeypatch):
    """An attempt at a run whose ranks end in a given way, without a record."""

    def begin(end):
        (tmp_path / RUN_FILE).touch()
        monkeypatch.setattr(Attempt, "_start_ranks", lambda self: end)
        config = plain_config(launcher=RayConfig(name=LauncherName.ray, stop_timeout_s=20))
        return Attempt(config=config, folder=tmp_path, lock=0, console=Console(quiet=True), requests=StopRequests())

    return begin


@pytest.mark.parametrize("is_saved", [True, False])
def test_ranks_that_were_killed_on_request_keep_what_they_saved(make, tmp_path, monkeypatch, make_checkpoint, is_saved):
    """Or the report would say that starting again begins at the first step, beside a checkpoint."""
    noted = {}
    monkeypatch.setattr(attempt, "finish_manifest", lambda *_, **kept: noted.update(kept))
    monkeypatch.setattr("tunebook.record.report.write_report", lambda *_: None)
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps({'step': 9, 'loss': 1.0})}\n")
    if is_saved:
        make_checkpoint(tmp_path, 4)
    with pytest.raises(StoppedError) as error:
        make(ProcessEnd(exit_code=-9, stopped_by="SIGTERM")).carry_out()
    resumes = f"resumes from {tmp_path / 'checkpoints' / 'checkpoint-4'}" if is_saved else "starts over"
    assert error.value.message.startswith(f"stopped by SIGTERM before it could save; the same command {resumes}")
    assert noted == {"step": 9, "last_checkpoint": "checkpoints/checkpoint-4" if is_saved else None}


@pytest.mark.parametrize(("free", "problem_id", "exit_code"), [(0, "disk-full", 3), (1 << 30, "run-lost", 1)])
def test_ranks_that_no_disk_had_space_for_a_record_of(make, monkeypatch, free, problem_id, exit_code):
    """torchrun ends with 1 whatever its ranks end with."""
    made = make(ProcessEnd(exit_code=1, stopped_by=None))
    monkeypatch.setattr("tunebook.launch.outcome.shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(TunebookError) as error:
        made.carry_out()
    assert (error.value.problem_id, error.value.exit_code) == (problem_id, exit_code)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """An attempt whose documents are compared, by a worker that writes some counts and ends with some code."""
    ran = []

    def begin(contamination, exact=0, code=0, stopped_by=None, is_there=True):
        def work(folder, when, requests):
            ran.append(when)
            if when == "contamination" and is_there:
                group = {"num_items": 10, "num_exact": exact, "num_overlapping": 0, "num_shared_passage": 0}
                group |= {"num_clean": 10 - exact, "examples": []}
                content = {"format": 1, "not_checked": None, "request": None, "groups": {"validation": group}}
                (folder / "contamination.json").write_text(json.dumps(content))
            return ProcessEnd(exit_code=code, stopped_by=stopped_by)

        monkeypatch.setattr(attempt, "run_worker", work)
        monkeypatch.setattr(attempt, "resume_command", lambda folder, when: "the same command")
        outcome = attempt.Outcome(rank=0, exit_code=0, reason=FINISHED, step=1, last_checkpoint=None)
        monkeypatch.setattr(Attempt, "_train", lambda self: ran.append("train") or outcome)
        config = plain_config(
            dataset=DatasetConfig(path="train.jsonl", validation_share=0.1),
            evaluation=EvaluationConfig(tasks=[], contamination=contamination),
            hardware=HardwareConfig(generation=Generation.cpu, gpus_per_node=1),
        )
        return Attempt(config=config, folder=tmp_path, lock=0, console=Console(quiet=True), requests=StopRequests())

    return begin, ran


def test_documents_are_compared_before_the_training_unless_it_is_switched_off(checked):
    begin, ran = checked
    begin(Contamination.disabled, exact=9)._train_and_evaluate()
    begin(Contamination.report, exact=9)._train_and_evaluate()
    assert ran == ["train", "contamination", "train"]


def test_a_failed_comparison_does_not_end_a_training_but_a_stop_does(checked):
    begin, ran = checked
    begin(Contamination.report, code=1, is_there=False)._train_and_evaluate()
    assert ran == ["contamination", "train"]
    with pytest.raises(StoppedError):
        begin(Contamination.report, code=6, stopped_by="SIGTERM")._train_and_evaluate()
    assert ran.count("train") == 1
