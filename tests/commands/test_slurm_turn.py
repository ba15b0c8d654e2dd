"""One turn of a job: a request to stop that finds nothing at work, and when another turn is asked for."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tunebook.commands.slurm_turn import carry_out_turn
from tunebook.config.frozen import config_to_yaml
from tunebook.launch import slurm as client
from tunebook.launch.supervise import StopRequests
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
def slurm_commands(monkeypatch):
    """The commands of Slurm that were run."""
    calls = []
    monkeypatch.setattr(client, "slurm", lambda *words: calls.append(words) or "")
    return calls


def requested(number):
    requests = StopRequests()
    with requests.listening():
        os.kill(os.getpid(), number)
    return requests


def test_a_request_before_the_first_step_starts_nothing_and_asks_for_another_turn(folder, slurm_commands, monkeypatch):
    monkeypatch.setattr("tunebook.commands.attempt.run_and_wait", None)  # nothing may be started
    assert carry_out_turn(folder, requested(signal.SIGUSR1)) == 6
    status = read_manifest(folder)["status"]
    assert status["state"] == "stopped" and status["reason"].startswith("stopped by SIGUSR1 between two phases")
    assert slurm_commands == [("scontrol", "requeue", "7")]
    assert carry_out_turn(folder, requested(signal.SIGTERM)) == 6  # stopped by the user
    assert len(slurm_commands) == 1


def test_three_turns_in_a_row_that_saved_nothing_are_the_last(folder, slurm_commands, make_checkpoint, capsys):
    for _ in range(2):
        carry_out_turn(folder, requested(signal.SIGUSR1))
    make_checkpoint(folder, 5)  # saved by the third turn
    for num_requeued in (3, 4, 4):
        assert carry_out_turn(folder, requested(signal.SIGUSR1)) == 6
        assert len(slurm_commands) == num_requeued
    assert "job 7: not requeued: three turns in a row saved nothing" in capsys.readouterr().out


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
    assert "stopped by SIGUSR1 between two phases" in ended.stdout, ended.stderr
    assert read_manifest(folder)["status"]["state"] == "stopped"
