"""Answers of Slurm's commands, as the versions from 22.05 on give them, and job scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tunebook.config.choices import Generation
from tunebook.errors import RequestError, TunebookError
from tunebook.launch.slurm import (
    check_job,
    job_script,
    job_state,
    option_words,
    script_text,
)


@pytest.fixture
def says(monkeypatch, tmp_path):
    """Put a program in the place of one of Slurm's commands."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name, output="", errors="", code=0):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat << 'END'\n{output}\nEND\ncat >&2 << 'END'\n{errors}\nEND\nexit {code}\n")
        program.chmod(0o755)

    return make


def test_a_machine_without_slurm_is_refused(small, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        check_job(small("slurm"))
    assert caught.value.problem_id == "slurm-not-found"


def test_refusal_has_slurms_own_words(small, says):
    says("sbatch", errors="sbatch: error: invalid partition specified: gpus\nallocation failure", code=1)
    with pytest.raises(RequestError) as caught:
        check_job(small("slurm", partition="gpus"))
    assert caught.value.problem_id == "slurm-refused"
    assert "invalid partition specified: gpus; allocation failure" in caught.value.message


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: fatal: Could not establish a configuration source",
    ],
)
def test_a_controller_that_is_down_is_no_refusal(small, says, said):
    says("sbatch", errors=said, code=1)
    with pytest.raises(TunebookError) as caught:
        check_job(small("slurm"))
    assert (caught.value.exit_code, caught.value.problem_id) == (1, "slurm-out-of-reach")


def test_how_a_job_stands(says):
    says(
        "scontrol",
        "JobId=12 JobName=x UserId=root(0) JobState=PENDING Reason=Nodes required for job are DOWN, DRAINED or "
        "reserved Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 NodeList=(null) "
        "NumNodes=2-2 TRES=cpu=4,mem=1G Command=/a b/job.sh",
    )
    state = job_state("12")
    assert state.text() == "PENDING (Nodes required for job are DOWN, DRAINED or reserved)"
    assert not state.has_ended
    says(
        "scontrol",
        "JobId=12 JobState=NODE_FAIL Reason=NodeDown ExitCode=0:9 NodeList=node[1-2] NumNodes=2",
    )
    state = job_state("12")
    assert (state.text(), state.has_ended) == ("NODE_FAIL (NodeDown) on node[1-2]", True)


def test_a_job_that_slurm_has_forgotten(says):
    says("scontrol", errors="slurm_load_jobs error: Invalid job id specified", code=1)
    assert job_state("12") is None
    says("scontrol", errors="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    with pytest.raises(TunebookError, match="Unable to contact"):
        job_state("12")


FOLDER = Path("/runs/1")


def test_two_nodes_of_eight_gpus(small, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    config = small("slurm", nodes=2, gpus=8, partition="gpu", time_limit="24:00:00")
    lines = job_script(config, FOLDER).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        *["--job-name=small", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"],
        *["--exclusive", "--mem=0", "--partition=gpu", "--time=24:00:00", "--output=/runs/1/slurm-%j.out"],
        *["--open-mode=append", "--requeue", "--signal=B:USR1@300"],
    ]
    assert lines[-2:] == [f"cd {tmp_path}", "exec /venv/bin/python -m tunebook.commands.slurm_job /runs/1"]


def test_shared_nodes_no_requeue_and_more_options(small):
    settings = {"cpus_per_task": 8, "requeue": False, "account": "physics", "stop_timeout_s": 60}
    assert option_words(small("slurm", generation=Generation.cpu, extra_args=["--qos=high"], **settings)) == [
        *["--job-name=small", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--account=physics"],
        *["--no-requeue", "--signal=B:USR1@60", "--qos=high"],
    ]


@pytest.mark.parametrize("name", ["with blank", "it's"])
def test_the_shell_reads_it_whatever_the_folders_are_called(small, monkeypatch, tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    monkeypatch.chdir(place)
    program = place / "python"
    program.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$SRUN_CPUS_PER_TASK" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    script = job_script(small("slurm"), place / "run")
    answer = subprocess.run(
        ["bash", "-c", script], env={"SLURM_CPUS_ON_NODE": "4", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert answer.stdout == f"{place}|4|-m|tunebook.commands.slurm_job|{place / 'run'}|", answer.stderr


@pytest.mark.parametrize("sign", ["\n", "\x1b", "\u2028"], ids=ascii)
@pytest.mark.parametrize("part", ["title", "extra_args", "folder", "python"])
def test_no_part_of_a_script_may_begin_another_line(small, monkeypatch, sign, part):
    """sbatch reads no option after a line that is none, and the node would run it."""
    config, text, folder = small("slurm"), f"x{sign}touch /tmp/injected", "/runs/a"
    if part == "title":
        config.title = text
    elif part == "extra_args":
        config.launcher.extra_args = [f"--comment={text}"]
    elif part == "folder":
        folder = f"/runs/{text}"
    else:
        monkeypatch.setattr(sys, "executable", text)
    with pytest.raises(RequestError) as caught:
        job_script(config, Path(folder))
    assert (caught.value.exit_code, caught.value.problem_id) == (2, "control-characters")
    assert sign not in caught.value.message


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--comment=two words", '"--comment=two words"'),
        ("--output=/runs/#1/it's", '"--output=/runs/#1/it\'s"'),
        ('--comment=a "b\\c"', r'"--comment=a \"b\\c\""'),
        ("--constraint=a|b&c", "--constraint=a|b&c"),
    ],
)
def test_what_means_something_to_sbatch_is_between_quotes(word, line):
    """As sbatch 22.05 was seen to read them."""
    assert f"#SBATCH {line}" in script_text([], [word], "true").splitlines()


def test_the_signs_of_a_folder_are_not_slurms(small):
    assert "--output=/runs/50%%j/slurm-%j.out" in option_words(small("slurm"), Path("/runs/50%j"))
