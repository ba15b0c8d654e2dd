"""`launcher=slurm` on a real Slurm of two nodes: submitted, followed, preempted, cancelled, and killed in parts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import at_work, host_of, ranks_of, train_words

ON_TWO = (
    *("hardware=cpu", "parallelism=ddp", "hardware.num_nodes=2", "hardware.gpus_per_node=1"),
    *("launcher=slurm", "launcher.stop_timeout_s=20", "launcher.timeout_s=60"),
)


@pytest.fixture
def start_job(start, slurm, tmp_path):
    """Submit the quickstart to both nodes and wait for it; returns the command and its newest run folder."""

    def begin(*overrides, steps=400, **environment):
        outputs = tmp_path / "outputs"
        words = train_words(outputs, *ON_TWO, "launcher.wait=true", *overrides, steps=steps)
        return start(words, **slurm, **environment), outputs / "quickstart" / "latest"

    return begin


def wait_for_steps(running, read_run, folder, count, timeout_s=180):
    running.wait_for(lambda: folder.exists() and len(read_run(folder).losses) >= count, timeout_s)


def test_a_submitted_job_takes_the_steps_of_one_rank_and_evaluates(
    run, slurm, in_slurm, read_run, one_rank, tmp_path, leaves_nothing
):
    outputs = tmp_path / "outputs"
    evaluation = ("evaluation=quickstart", "evaluation.before=false", "evaluation.limit=2")
    ended = run(train_words(outputs, *ON_TWO, *evaluation, steps=len(one_rank)), **slurm)
    assert ended.exit_code == 0, ended.output
    folder = outputs / "quickstart" / "latest"
    job = re.search(r"submitted as job (\d+)", ended.output)[1]
    assert f"tail -F {folder.resolve() / f'slurm-{job}.out'}" in ended.output
    end = time.monotonic() + 120
    while "JobState=COMPLETED" not in in_slurm("scontrol", "show", "job", job):
        assert time.monotonic() < end, (folder / f"slurm-{job}.out").read_text()
        time.sleep(0.5)
    finished = read_run(folder)
    assert finished.status["state"] == "finished"
    assert finished.losses == pytest.approx(one_rank, rel=1e-5)
    assert (folder / "evaluation" / "after.json").exists()
    leaves_nothing()


def test_a_preempted_job_saves_is_requeued_and_finishes_in_its_folder(
    start_job, in_slurm, run, slurm, read_run, tmp_path, leaves_nothing
):
    running, folder = start_job("launcher.partition=low", steps=60)
    wait_for_steps(running, read_run, folder, 3)
    place = folder.resolve()
    urgent = in_slurm(
        *["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"],
        *["--wrap", "sleep 300"],
    )
    running.wait_for(lambda: "requeued: it resumes in this folder" in running.output, 120)
    running.wait_for(lambda: in_slurm("squeue", "--noheader", "--format=%T", f"--job={urgent}") == "RUNNING", 120)
    stopped = read_run(place)
    assert stopped.status["state"] == "stopped"
    assert "stopped by SIGUSR1 after step" in stopped.status["reason"]
    again = run(train_words(tmp_path / "outputs", *ON_TWO, "launcher.partition=low", steps=60), **slurm)
    assert again.exit_code == 2, again.output
    assert "is Slurm's job" in again.output  # it waits: two jobs must not work in one folder
    in_slurm("scancel", urgent)
    ended = running.wait(150)
    assert ended.exit_code == 0, ended.output
    finished = read_run(place)
    assert finished.status["state"] == "finished"
    assert len(finished.losses) == 60
    for text in ("PENDING", "RUNNING on node[1-2]", "step 60/60", "COMPLETED"):
        assert text in ended.output, text
    leaves_nothing()


def test_ctrl_c_lets_the_job_save_and_does_not_requeue_it(start_job, in_slurm, read_run, leaves_nothing):
    running, folder = start_job()
    wait_for_steps(running, read_run, folder, 3)
    running.interrupt()
    ended = running.wait(150)
    assert ended.exit_code == 6, ended.output
    assert "scancel --batch --signal=TERM" in ended.output
    stopped = read_run(folder)
    assert stopped.status["state"] == "stopped"
    assert stopped.checkpoints == [f"checkpoint-{len(stopped.losses)}"]
    assert in_slurm("squeue", "--noheader") == ""
    leaves_nothing()


def test_a_rank_that_is_killed_is_named_with_its_node_and_the_same_command_resumes(start_job, read_run, leaves_nothing):
    running, folder = start_job("training.save_every_steps=2", steps=60)
    wait_for_steps(running, read_run, folder, 5)
    process = ranks_of(folder.resolve())[1]
    host = host_of(process)
    os.kill(process, signal.SIGKILL)
    ended = running.wait(150)
    assert ended.exit_code == 1, ended.output
    killed = read_run(folder)
    reason = killed.status["reason"]
    assert "rank 1 ended without recording a reason: it was killed by SIGKILL" in reason
    assert f"[rank 1 on {host}]" in reason
    assert reason in ended.output
    leaves_nothing()
    running, folder = start_job("training.save_every_steps=2", steps=60)
    ended = running.wait(150)
    assert ended.exit_code == 0, ended.output
    assert read_run(folder).folder == killed.folder
    assert len(read_run(folder).losses) == 60


def test_a_node_whose_processes_are_killed_ends_the_job(start_job, read_run, leaves_nothing):
    running, folder = start_job()
    wait_for_steps(running, read_run, folder, 3)
    for process in at_work(folder.resolve()):
        if host_of(process) == "node2":
            os.kill(process, signal.SIGKILL)
    ended = running.wait(150)
    assert ended.exit_code == 1, ended.output
    assert read_run(folder).status["state"] == "failed"
    leaves_nothing()


def test_a_rank_that_stands_still_ends_the_job_in_time(start_job, read_run, leaves_nothing):
    running, folder = start_job("launcher.timeout_s=20")
    wait_for_steps(running, read_run, folder, 3)
    os.kill(ranks_of(folder.resolve())[1], signal.SIGSTOP)
    ended = running.wait(150)
    assert ended.exit_code == 1, ended.output
    leaves_nothing()


def test_a_killed_head_ends_the_job_and_is_not_taken_for_success(start_job, read_run, leaves_nothing):
    running, folder = start_job()
    wait_for_steps(running, read_run, folder, 3)
    place = folder.resolve()
    (head,) = [process for process, words in at_work(place).items() if " -m tunebook.commands.slurm_job " in words]
    os.kill(head, signal.SIGKILL)
    ended = running.wait(150)
    assert ended.exit_code == 1, ended.output
    assert "ended without recording a reason: FAILED" in ended.output
    assert read_run(place).status["state"] == "failed"
    leaves_nothing(45)  # Slurm itself gives the job's steps half a minute


def test_a_node_that_does_not_come_up_ends_the_job_in_time(start_job, in_slurm, project_root, slurm, read_run,
                                                           leaves_nothing):  # fmt: skip
    os.kill(int(Path("/run/tunebook-ci-slurm/slurmd-node2.pid").read_text()), signal.SIGKILL)
    try:
        running, folder = start_job("launcher.timeout_s=20")
        ended = running.wait(150)
    finally:
        subprocess.run([project_root / ".ci" / "slurm", "start", "node2"], check=True, env=os.environ | slurm)
    assert ended.exit_code == 1, ended.output
    assert read_run(folder).status["state"] == "failed"
    assert "node2" in ended.output
    leaves_nothing()
