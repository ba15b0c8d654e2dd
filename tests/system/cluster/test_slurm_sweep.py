"""`tunebook sweep launcher=slurm` on a real Slurm of two nodes: an array that fails, is stopped, preempted, killed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

JOBS = ("launcher=slurm", "launcher.cpus_per_task=1", "launcher.stop_timeout_s=20", "hardware=cpu")


@pytest.fixture
def words_of(tmp_path):
    """A sweep of the quickstart that writes to the test's folder."""

    def words(*overrides, steps):
        return [
            *["tunebook", "sweep", "quickstart", "evaluation=none", "schedule.warmup_steps=0", *JOBS],
            *["hardware.gpus_per_node=1", f"training.max_steps={steps}", f"outputs={tmp_path}", *overrides],
        ]

    return words


@pytest.fixture
def submit(run, slurm):
    """Submit a sweep; returns the job ID of its array."""

    def type_in(words):
        ended = run(words, 120, **slurm)
        assert ended.exit_code == 0, ended.output
        return re.search(r"submitted as job (\d+)", ended.output)[1]

    return type_in


@pytest.fixture
def has_ended(in_slurm):
    """Whether Slurm has no job any more."""
    return lambda: in_slurm("squeue", "--noheader") == ""


def wait_for(is_so, within_s):
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def sweep_folder(tmp_path):
    (folder,) = (tmp_path / "quickstart").glob("sweep-*")
    return folder


def rows_of(tmp_path):
    with (sweep_folder(tmp_path) / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def num_steps(read_run, tmp_path, trial):
    folders = list(tmp_path.glob(f"quickstart/sweep-*/trial-{trial:03d}"))
    return len(read_run(folders[0]).losses) if folders else 0


def kill_processes_of(folder):
    """As when a node runs out of memory: the task and its trial, at once."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            is_in_task = b"SLURM_ARRAY_TASK_ID=" in (process / "environ").read_bytes()
            if is_in_task and str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    assert found
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def test_trials_are_tasks_and_a_failing_one_is_a_row(
    run, slurm, submit, has_ended, read_run, words_of, project_root, tmp_path, leaves_nothing
):
    good, wild = project_root / "recipes" / "quickstart" / "model", tmp_path / "wild"
    shutil.copytree(good, wild)
    config = json.loads((wild / "config.json").read_text())
    (wild / "config.json").write_text(json.dumps(config | {"initializer_range": 1e30}))  # its loss is not finite
    words = words_of(f"model.path={wild},{good}", "training.seed=0,1", "--jobs=2", "packing=padded", steps=4)
    job_id = submit(words)
    again = run(words, **slurm)
    assert again.exit_code == 0, again.output
    assert f"once job {job_id} has ended" in again.output
    wait_for(has_ended, 300)
    table = run(words, **slurm)
    assert table.exit_code == 7, table.output
    assert "submitted" not in table.output
    rows = rows_of(tmp_path)
    assert [row["exit_code"] for row in rows] == ["0", "0", "7", "7"]
    assert "not finite at step" in rows[2]["how_it_ended"]
    for number in (2, 3):
        finished = read_run(sweep_folder(tmp_path) / f"trial-{number:03d}")
        assert (finished.status["state"], len(finished.losses)) == ("finished", 4)
        assert "name: local" in (finished.folder / "run.yaml").read_text()
    leaves_nothing(30)


def test_a_canceled_array_saves_and_the_same_command_submits_what_is_left(
    submit, has_ended, in_slurm, read_run, words_of, tmp_path, leaves_nothing
):
    words = words_of("training.seed=0,1", "--jobs=1", steps=40)
    job_id = submit(words)
    wait_for(lambda: num_steps(read_run, tmp_path, 0) >= 3, 200)
    in_slurm("scancel", job_id)
    wait_for(has_ended, 60)
    stopped = read_run(sweep_folder(tmp_path) / "trial-000")
    assert stopped.checkpoints == [f"checkpoint-{len(stopped.losses)}"]
    assert [row["exit_code"] for row in rows_of(tmp_path)] == ["6", ""]
    submit(words)
    wait_for(has_ended, 400)
    assert [row["exit_code"] for row in rows_of(tmp_path)] == ["0", "0"]
    assert [num_steps(read_run, tmp_path, trial) for trial in (0, 1)] == [40, 40]
    assert "resuming from" in (sweep_folder(tmp_path) / "trial-000.log").read_text()
    leaves_nothing(30)


def test_a_task_whose_time_ends_saves_is_requeued_and_finishes(
    submit, has_ended, in_slurm, read_run, words_of, tmp_path, leaves_nothing
):
    job_id = submit(words_of("training.seed=0,1", "--jobs=1", steps=40))
    wait_for(lambda: num_steps(read_run, tmp_path, 0) >= 3, 200)
    in_slurm("scancel", "--batch", "--signal=USR1", f"{job_id}_0")  # what Slurm sends before the time limit
    wait_for(has_ended, 500)
    assert [row["exit_code"] for row in rows_of(tmp_path)] == ["0", "0"]
    assert [num_steps(read_run, tmp_path, trial) for trial in (0, 1)] == [40, 40]
    assert "resuming from" in (sweep_folder(tmp_path) / "trial-000.log").read_text()
    leaves_nothing(30)


def test_a_search_loses_no_trial_to_a_killed_task(submit, has_ended, read_run, words_of, tmp_path, leaves_nothing):
    words = words_of("optimizer.learning_rate=tag(log,interval(1e-4,1e-2))", "--num-trials=3", "--jobs=1", steps=12)
    submit(words)
    wait_for(lambda: num_steps(read_run, tmp_path, 1) >= 1, 200)
    kill_processes_of(sweep_folder(tmp_path))
    wait_for(has_ended, 300)
    assert [row["exit_code"] for row in rows_of(tmp_path)] == ["0", "0", ""]
    submit(words)
    wait_for(has_ended, 200)
    rows = rows_of(tmp_path)
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert len({row["optimizer.learning_rate"] for row in rows}) == 3
    leaves_nothing(30)
