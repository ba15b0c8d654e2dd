"""Following a job: a controller that is silent meanwhile, and requests to stop; answers stand in the place of Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
from rich.console import Console

from tunebook import slurm as client
from tunebook.errors import RequestError, TunebookError
from tunebook.launch.slurm import submit as module
from tunebook.launch.slurm.submit import follow, submit
from tunebook.record.manifest import RunState, finish_manifest, read_manifest, start_manifest
from tunebook.slurm import JobState

from ...conftest import config_of


@pytest.fixture
def config():
    return config_of("quickstart", "launcher=slurm")


@pytest.fixture
def folder(tmp_path, config, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    start_manifest(tmp_path, config, world_size=1, command=["tunebook"])
    return tmp_path


@pytest.fixture
def answering(monkeypatch):
    """Let each question how the job stands be answered by the next function; returns what Slurm was told to do."""

    def begin(*answers, told=0):
        left, words = iter(answers), []

        def run(*command):
            words.append(" ".join(command))
            return subprocess.CompletedProcess(command, told, stdout="12\n", stderr="Unable to contact")

        monkeypatch.setattr(client, "job_state", lambda job_id: next(left)())
        monkeypatch.setattr(module, "job_state", lambda job_id: next(left)())
        monkeypatch.setattr(module, "slurm", run)
        monkeypatch.setattr(client, "slurm", run)
        return words

    return begin


def running():
    return JobState(name="RUNNING", reason="None", nodes="node1", exit_code=0, signal=0)


def ended(folder, exit_code):
    def end():
        finish_manifest(folder, RunState.stopped if exit_code == 6 else RunState.finished, exit_code, None)
        return JobState(name="COMPLETED", reason="None", nodes="node1", exit_code=exit_code, signal=0)

    return end


def silent():
    raise TunebookError("no answer", problem_id="slurm-out-of-reach")


def test_a_controller_that_is_silent_for_a_while_ends_no_follower(folder, answering, capsys):
    answering(running, silent, silent, running, ended(folder, 0))
    assert follow("12", folder, Console()) == 0
    printed = capsys.readouterr().out
    assert "job 12: Slurm's controller does not answer; waiting" in printed
    assert "job 12: COMPLETED on node1" in printed


def test_a_request_to_stop_reaches_the_job_once_the_controller_answers(folder, answering, capsys):
    def asked():
        os.kill(os.getpid(), signal.SIGINT)
        return running()

    words = answering(asked, silent, running, ended(folder, 6), told=1)
    assert follow("12", folder, Console(width=200)) == 6
    assert words == ["scancel --batch --signal=TERM 12"]
    assert "was not reached: Unable to contact; type it again: scancel --batch" in capsys.readouterr().out


def test_a_job_that_was_taken_is_submitted_although_nobody_says_how_it_stands(folder, config, answering, capsys):
    words = answering(silent)
    assert submit(config, folder, Console(width=200)) == "12"
    assert words == [f"sbatch --parsable {folder / 'job.sh'}"]
    assert read_manifest(folder)["slurm"]["job_id"] == "12"
    assert "submitted as job 12\n" in capsys.readouterr().out


def test_what_is_printed_of_a_job_stops_one_that_runs_and_one_that_waits(folder, config, answering, capsys):
    """scancel sends no signal to a job that has not begun."""
    answering(running)
    submit(config, folder, Console(width=200))
    printed = capsys.readouterr().out
    assert "stop and save:   scancel --batch --signal=TERM 12\n" in printed
    assert "take it back while it waits: scancel 12\n" in printed


def waiting(reason):
    return lambda: JobState(name="PENDING", reason=reason, nodes="", exit_code=0, signal=0)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("DependencyNeverSatisfied", "has it wait for (--dependency) has failed or is not there; name another job"),
        ("BadConstraints", "no nodes are as launcher.extra_args, launcher.partition and hardware ask for"),
        ("launch_failed_requeued_held", "its node could not start it, and Slurm holds it"),
        ("launch failed requeued held", "its node could not start it, and Slurm holds it"),
    ],
)
def test_a_job_that_can_never_run_is_taken_back(folder, answering, monkeypatch, reason, advice):
    monkeypatch.setattr(client, "HOPELESS_FOR_S", 0.0)
    words = answering(waiting("Priority"), waiting(reason))
    with pytest.raises(RequestError) as caught:
        follow("12", folder, Console())
    assert caught.value.message.startswith(f"Slurm's job 12 can never run ({reason}), and was taken back: ")
    assert advice in caught.value.message
    assert words == ["scancel 12"]
    status = read_manifest(folder)["status"]
    assert (status["state"], status["exit_code"], status["reason"]) == ("failed", 2, caught.value.message)


def test_a_job_that_cannot_be_taken_back_is_said_to_be_there_still(folder, answering, monkeypatch):
    monkeypatch.setattr(client, "HOPELESS_FOR_S", 0.0)
    answering(waiting("BadConstraints"), told=1)
    with pytest.raises(RequestError) as caught:
        follow("12", folder, Console())
    assert caught.value.message.startswith(
        "Slurm's job 12 can never run (BadConstraints), and could not be taken back: Unable to contact; type: scancel "
        "12. Why: no nodes are as "
    )
    assert read_manifest(folder)["status"]["reason"] == caught.value.message
    answering(waiting("BadConstraints"))
    monkeypatch.setattr(client, "slurm", lambda *words: silent())
    with pytest.raises(RequestError, match="could not be taken back: no answer; type: scancel 12"):
        follow("12", folder, Console())


def test_what_an_earlier_turn_saved_stays_on_record(folder, answering, monkeypatch):
    monkeypatch.setattr(client, "HOPELESS_FOR_S", 0.0)
    finish_manifest(folder, RunState.stopped, 6, "stopped", step=40, last_checkpoint="checkpoint-40")
    answering(waiting("launch failed requeued held"))
    with pytest.raises(RequestError):
        follow("12", folder, Console())
    status = read_manifest(folder)["status"]
    assert (status["state"], status["step"], status["last_checkpoint"]) == ("failed", 40, "checkpoint-40")


@pytest.mark.parametrize(("gap_s", "is_taken_back"), [(14.0, False), (15.0, True)])
def test_a_reason_that_passes_takes_no_job_back(folder, answering, monkeypatch, gap_s, is_taken_back):
    """Three looks in a row are two gaps; two such stretches together are longer than a hopeless one may be."""

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def later(reason):
        def look():
            clock.now += gap_s
            return waiting(reason)()

        return look

    stretch = [later("BadConstraints")] * 3
    words = answering(*stretch, later("Priority"), *stretch, running, ended(folder, 0))
    if is_taken_back:
        with pytest.raises(RequestError, match="can never run"):
            follow("12", folder, Console())
    else:
        assert follow("12", folder, Console()) == 0
    assert words == (["scancel 12"] if is_taken_back else [])


def test_a_job_that_its_user_holds_is_waited_for_with_a_word(folder, answering, monkeypatch, capsys):
    monkeypatch.setattr(client, "HOPELESS_FOR_S", 0.0)
    words = answering(*[waiting("JobHeldUser")] * 3, ended(folder, 0))
    assert follow("12", folder, Console(width=200)) == 0
    assert words == []
    printed = capsys.readouterr().out
    assert printed.count("job 12: PENDING (JobHeldUser); let it go with: scontrol release 12\n") == 1
