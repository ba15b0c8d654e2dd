"""Following a job: a controller that is silent meanwhile, and requests to stop; answers stand in the place of Slurm."""

from __future__ import annotations

import os
import signal

import pytest
from rich.console import Console

from tunebook.errors import TunebookError
from tunebook.launch import slurm as module
from tunebook.launch.slurm import JobState, follow, submit
from tunebook.record.manifest import RunState, finish_manifest, read_manifest, start_manifest


@pytest.fixture
def config(small):
    return small("slurm")


@pytest.fixture
def folder(tmp_path, config, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(module, "_SILENT_POLL_S", 0.001)
    start_manifest(tmp_path, config, world_size=1, command=["tunebook"])
    return tmp_path


@pytest.fixture
def answering(monkeypatch):
    """Let each question how the job stands be answered by the next function; returns what Slurm was told to do."""

    def begin(*answers, told=0):
        left, words = iter(answers), []

        def run(*command, input_text=None):
            words.append(" ".join(command))
            if told:
                raise TunebookError("Unable to contact", problem_id="slurm-out-of-reach")
            return "12\n"

        monkeypatch.setattr(module, "job_state", lambda job_id: next(left)())
        monkeypatch.setattr(module, "slurm", run)
        return words

    return begin


def running():
    return JobState(name="RUNNING", reason="None", nodes="node1")


def ended(folder, exit_code):
    def end():
        finish_manifest(folder, RunState.stopped if exit_code == 6 else RunState.finished, exit_code, None)
        return JobState(name="COMPLETED", reason="None", nodes="node1")

    return end


def silent():
    raise TunebookError("no answer", problem_id="slurm-out-of-reach")


def test_a_controller_that_is_silent_for_a_while_ends_no_follower(folder, answering, capsys):
    answering(running, silent, silent, running, ended(folder, 0))
    assert follow("12", folder, Console()) == 0
    printed = capsys.readouterr().out
    assert printed.count("job 12: no answer; trying again") == 2
    assert "job 12: COMPLETED on node1" in printed


def test_a_request_to_stop_reaches_the_job_once_the_controller_answers(folder, answering, capsys):
    def asked():
        os.kill(os.getpid(), signal.SIGINT)
        return running()

    words = answering(asked, silent, running, ended(folder, 6), told=1)
    assert follow("12", folder, Console(width=200)) == 6
    assert words == ["scancel --batch --signal=TERM 12"]
    assert "was not reached: Unable to contact; type it again: scancel --batch" in capsys.readouterr().out


def test_a_submitted_job_is_recorded(folder, config, answering, capsys):
    words = answering()
    assert submit(config, folder, Console(width=200)) == "12"
    assert words == [f"sbatch --parsable {folder / 'job.sh'}"]
    assert read_manifest(folder)["slurm"]["job_id"] == "12"
    printed = capsys.readouterr().out
    # scancel sends no signal to a job that has not begun
    assert "scancel --batch --signal=TERM 12\n" in printed and "scancel 12\n" in printed
