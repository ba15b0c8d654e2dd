"""What an attempt says of ranks that could not say themselves how they ended."""

import errno
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands import attempt
from tunebook.commands.attempt import Attempt
from tunebook.config.choices import Contamination, Generation, LauncherName
from tunebook.config.frozen import plain_config
from tunebook.config.schema import DatasetConfig, EvaluationConfig, HardwareConfig, RayConfig
from tunebook.launch.supervise import ProcessEnd
from tunebook.record.run_folder import FINISHED, RUN_FILE


@pytest.fixture
def make(tmp_path, monkeypatch):
    """An attempt at a run whose ranks end in a given way, with some checkpoint left."""

    def begin(end, newest=None):
        (tmp_path / RUN_FILE).touch()
        monkeypatch.setattr(Attempt, "_start_ranks", lambda self: end)
        monkeypatch.setattr(attempt, "newest_checkpoint", lambda folder: newest)
        config = plain_config(launcher=RayConfig(name=LauncherName.ray, stop_timeout_s=20))
        return Attempt(config=config, folder=tmp_path, lock=0, console=Console(quiet=True))

    return begin


@pytest.mark.parametrize(
    ("logged", "newest", "said"),
    [
        ([], None, "before the first step"),
        (
            [3, 4],
            Path("/r/checkpoint-4"),
            "after step 4, which is saved; the same command resumes from /r/checkpoint-4",
        ),
        ([3], None, "after step 3 and before a save; the same command starts over, since there is no checkpoint"),
        (
            [4, 9],
            Path("/r/checkpoint-4"),
            "after step 9 and before a save; the same command resumes from /r/checkpoint-4",
        ),
    ],
    ids=["at once", "after a checkpoint", "no checkpoint", "steps after a checkpoint"],
)
def test_ranks_that_were_killed_on_request_leave_word_of_how_far_they_came(make, tmp_path, logged, newest, said):
    """The third request gives them no time to save."""
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in logged]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(attempt.StoppedError) as error:
        make(ProcessEnd(exit_code=-9, stopped_by="SIGTERM"), newest).carry_out()
    assert error.value.message == f"stopped by SIGTERM {said}"


def test_what_ranks_without_a_word_logged_and_saved_is_in_the_records(make, tmp_path, monkeypatch):
    """Or the report would say that starting again begins at the first step, beside a checkpoint."""
    noted = {}
    monkeypatch.setattr(attempt, "finish_manifest", lambda *_, **kept: noted.update(kept))
    monkeypatch.setattr("tunebook.record.report.write_report", lambda *_: None)
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps({'step': 9, 'loss': 1.0})}\n")
    with pytest.raises(attempt.StoppedError):
        make(ProcessEnd(exit_code=-9, stopped_by="SIGTERM"), tmp_path / "checkpoints" / "checkpoint-4").carry_out()
    assert noted == {"step": 9, "last_checkpoint": "checkpoints/checkpoint-4"}


@pytest.mark.parametrize(("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_ranks_that_no_disk_had_room_for_a_word_of(make, monkeypatch, code, is_full):
    """torchrun ends with 1 whatever its ranks end with."""

    def write(**_):
        raise OSError(code, os.strerror(code))

    made = make(ProcessEnd(exit_code=1, stopped_by=None))
    monkeypatch.setattr(attempt, "TemporaryFile", write)
    with pytest.raises(attempt.TunebookError) as error:
        made.carry_out()
    assert error.value.problem_id == ("disk-full" if is_full else "run-lost")
    assert error.value.exit_code == (3 if is_full else 1)


def test_ranks_without_a_word_on_a_disk_with_room(make):
    with pytest.raises(attempt.TunebookError, match="ended with exit code 1 and recorded no reason"):
        make(ProcessEnd(exit_code=1, stopped_by=None)).carry_out()


@pytest.mark.parametrize("number", [6, 9])
def test_memory_is_only_thought_of_where_the_system_may_have_killed_a_rank(make, number):
    with pytest.raises(attempt.TunebookError) as error:
        make(ProcessEnd(exit_code=-number, stopped_by=None)).carry_out()
    assert f"the launch of the ranks was killed by signal {number} and recorded no reason" in error.value.message
    assert ("ran out of memory" in error.value.message) == (number == 9)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """An attempt whose documents are compared, by a worker that writes some counts and ends with some code."""
    ran = []

    def begin(contamination, exact=0, code=0, stopped_by=None, is_there=True, generation=Generation.cpu, **options):
        def work(folder, when):
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
            evaluation=EvaluationConfig(**({"tasks": [], "contamination": contamination} | options)),
            hardware=HardwareConfig(generation=generation, gpus_per_node=1),
        )
        return Attempt(config=config, folder=tmp_path, lock=0, console=Console(quiet=True))

    return begin, ran


def test_documents_are_compared_before_the_training(checked):
    begin, ran = checked
    begin(Contamination.report, exact=9)._train_and_evaluate()
    assert ran == ["contamination", "train"]
    begin(Contamination.disabled, exact=9)._train_and_evaluate()
    assert ran[2:] == ["train"]


def test_nothing_is_trained_on_items_of_the_evaluation_if_that_is_refused(checked):
    begin, ran = checked
    with pytest.raises(attempt.DataError) as error:
        begin(Contamination.refuse, exact=9)._train_and_evaluate()
    assert (error.value.problem_id, error.value.exit_code, ran) == ("contaminated", 4, ["contamination"])
    begin(Contamination.refuse)._train_and_evaluate()
    assert ran == ["contamination", "contamination", "train"]


def test_a_failed_comparison_ends_a_training_only_if_it_must_not_be_contaminated(checked):
    begin, ran = checked
    begin(Contamination.report, code=1, is_there=False)._train_and_evaluate()
    assert ran == ["contamination", "train"]
    with pytest.raises(attempt.DataError) as error:
        begin(Contamination.refuse, code=1, is_there=False)._train_and_evaluate()
    assert error.value.problem_id == "contamination-not-checked"
    with pytest.raises(attempt.StoppedError):
        begin(Contamination.report, code=6, stopped_by="SIGTERM")._train_and_evaluate()
    assert ran.count("train") == 1
