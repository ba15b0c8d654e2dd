"""One turn of a job: a request to stop that finds nothing at work, and when another turn is asked for."""

import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from tunebook.commands import slurm_turn as turn
from tunebook.commands.slurm_turn import carry_out_turn
from tunebook.config.frozen import config_to_yaml
from tunebook.errors import TunebookError
from tunebook.launch import slurm as client
from tunebook.launch.slurm import JobState
from tunebook.record.manifest import read_manifest, start_manifest

from ..conftest import config_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run's folder as its job finds it."""
    words = ["launcher=slurm", "launcher.stop_timeout_s=60"]
    config = config_of("quickstart", *words)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text(config_to_yaml(config))
    (run / "prepared.json").write_text(json.dumps({"folder": str(tmp_path)}))
    start_manifest(run, config, world_size=1, command=["tunebook"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return run


@pytest.fixture
def asked_of_slurm(monkeypatch):
    """The commands of Slurm that were run."""
    calls = []

    def answer(*words):
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, stdout="", stderr="")

    monkeypatch.setattr(client, "slurm", answer)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    return calls


def state(run_s, limit_s):
    return JobState(name="RUNNING", reason="", nodes="a", run_s=run_s, limit_s=limit_s)


@pytest.mark.parametrize(
    ("job", "is_requeued"),
    [
        (state(5, None), True),  # preempted: there is no limit
        (state(5, 3600), True),  # preempted long before it
        (state(1, 152), True),  # 60 s to stop, 60 s early at most, 30 s for clocks: 150
        (state(2, 152), False),
        (state(100, 180), False),
        (None, True),  # Slurm does not know it any more, and will say so itself
    ],
)
def test_a_request_before_the_first_step_starts_nothing(folder, asked_of_slurm, monkeypatch, job, is_requeued):
    monkeypatch.setattr(turn, "job_state", lambda job_id: job)
    monkeypatch.setattr("tunebook.commands.attempt.run_and_wait", None)  # nothing may be started
    assert carry_out_turn(folder, [signal.SIGUSR1]) == 6
    status = read_manifest(folder)["status"]
    assert (status["state"], status["reason"]) == ("stopped", "stopped by SIGUSR1 between two steps")
    assert asked_of_slurm == ([("scontrol", "requeue", "7")] if is_requeued else [])


def test_one_that_the_user_stopped_is_not_asked_for_again(folder, asked_of_slurm):
    assert carry_out_turn(folder, [signal.SIGTERM, signal.SIGUSR1]) == 6
    assert asked_of_slurm == []


def test_what_was_saved_is_gone_on_with_whatever_the_limit(folder, asked_of_slurm):
    settings = config_of("quickstart", "launcher=slurm").launcher
    turn._requeue(settings, Console(), has_progress=True)
    assert asked_of_slurm == [("scontrol", "requeue", "7")]


@pytest.mark.parametrize(
    "silence",
    [
        "Unexpected message received for job 7",
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
        None,  # the command itself was given up
    ],
)
def test_a_controller_that_is_silent_at_the_end_of_a_turn_is_waited_for(folder, monkeypatch, capsys, silence):
    """As while it is restarted: the job would end for good."""
    asked = []

    def answer(*words):
        asked.append(words)
        if len(asked) > 3:
            return subprocess.CompletedProcess(words, 0, stdout="", stderr="")
        if silence is None:
            raise TunebookError("scontrol did not answer within 60 s", problem_id="slurm-out-of-reach")
        return subprocess.CompletedProcess(words, 1, stdout="", stderr=f"{silence}\n")

    answers = [out_of_reach, lambda: state(5, 3600)]
    monkeypatch.setattr(client, "slurm", answer)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    monkeypatch.setattr(turn, "job_state", lambda job_id: answers.pop(0)())
    assert carry_out_turn(folder, [signal.SIGUSR1]) == 6
    assert asked == [("scontrol", "requeue", "7")] * 4
    printed = capsys.readouterr().out
    assert printed.count("; trying again in ") == 4
    assert "job 7: requeued: it resumes in this folder" in printed


def out_of_reach():
    raise TunebookError("no answer", problem_id="slurm-out-of-reach")


def test_what_slurm_refuses_is_said_and_asked_once(folder, monkeypatch, capsys):
    asked = []

    def refuse(*words):
        asked.append(words)
        return subprocess.CompletedProcess(words, 1, stdout="", stderr="Requested operation is presently disabled\n")

    monkeypatch.setattr(client, "slurm", refuse)
    monkeypatch.setattr(turn, "job_state", lambda job_id: state(5, None))
    assert carry_out_turn(folder, [signal.SIGUSR1]) == 6
    assert len(asked) == 1
    assert "job 7: not requeued: Requested operation is presently disabled" in capsys.readouterr().out


def test_a_controller_that_stays_silent_is_given_up_with_a_word(folder, monkeypatch, capsys):
    monkeypatch.setattr(client, "SILENT_WITHIN_S", 0.0)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    monkeypatch.setattr(turn, "job_state", lambda job_id: state(5, None))
    monkeypatch.setattr(client, "slurm", lambda *words: out_of_reach())
    assert carry_out_turn(folder, [signal.SIGUSR1]) == 6
    assert "job 7: not requeued: no answer" in capsys.readouterr().out


def test_a_signal_while_python_imports_is_not_lost(folder):
    """The kernel would end the process, and Slurm call the job failed."""
    program = (
        "import os, signal, sys\n"
        "import tunebook.commands.slurm_job as program\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'tunebook.commands.slurm_turn': os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(program.main())\n"
    )
    words = [sys.executable, "-c", program, str(folder)]
    environment = os.environ | {"PATH": "/nowhere"}  # no Slurm: it cannot be asked for another turn
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert "stopped by SIGUSR1 between two steps" in ended.stdout, ended.stderr
    assert read_manifest(folder)["status"]["state"] == "stopped"
