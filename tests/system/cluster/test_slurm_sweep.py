"""`tunebook sweep --launcher=slurm` on a real Slurm of two nodes: followed, killed, stopped, preempted."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

JOBS = ("--launcher=slurm", "launcher.cpus_per_task=1", "launcher.stop_timeout_s=20", "hardware=cpu")


@pytest.fixture
def words_of(tmp_path):
    """A sweep of the quickstart that writes to the test's folder."""

    def words(*overrides, steps):
        return [
            *["tunebook", "sweep", "quickstart", "evaluation=none", "schedule.warmup_steps=0", *JOBS],
            *[f"training.max_steps={steps}", f"outputs={tmp_path}", *overrides],
        ]

    return words


def sweep_folder(tmp_path):
    (folder,) = (tmp_path / "quickstart").glob("sweep-*")
    return folder


def rows_of(tmp_path):
    with (sweep_folder(tmp_path) / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def kill_processes_of(job_id):
    """As when a node runs out of memory. scancel's KILL leaves a trial the time to save: its parent dies first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, words = ((folder / name).read_bytes() for name in ("environ", "cmdline"))
        except OSError:  # it has ended meanwhile
            continue
        if f"SLURM_JOB_ID={job_id}".encode() in environment.split(b"\0") and b"slurmstepd" not in words:
            found.append(int(folder.name))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def num_steps(read_run, tmp_path, trial):
    folders = list(tmp_path.glob(f"quickstart/sweep-*/trial-{trial:03d}"))
    return len(read_run(folders[0]).losses) if folders else 0


def test_trials_are_jobs_that_train_locally_and_a_failing_one_is_a_row(
    run, slurm, in_slurm, read_run, words_of, project_root, tmp_path, leaves_nothing
):
    good, wild = project_root / "recipes" / "quickstart" / "model", tmp_path / "wild"
    shutil.copytree(good, wild)
    config = json.loads((wild / "config.json").read_text())
    (wild / "config.json").write_text(json.dumps(config | {"initializer_range": 1e30}))  # its loss is not finite
    words = words_of(f"model.path={wild},{good}", "training.seed=0,1", "--jobs=2", "packing=padded", steps=4)
    ended = run(words, 300, **slurm)
    assert ended.exit_code == 7, ended.output
    assert len(re.findall(r"submitted as job \d+", ended.output)) == 4
    rows = rows_of(tmp_path)
    assert [row["exit_code"] for row in rows] == ["0", "0", "7", "7"]
    assert "not finite at step" in rows[2]["how_it_ended"]
    for number in (2, 3):
        finished = read_run(sweep_folder(tmp_path) / f"trial-{number:03d}")
        assert (finished.status["state"], len(finished.losses)) == ("finished", 4)
        assert "name: local" in (finished.folder / "run.yaml").read_text()
    assert in_slurm("squeue", "--noheader") == ""
    leaves_nothing(30)


def test_a_partition_that_does_not_exist_is_refused_before_anything_is_made(run, slurm, words_of, tmp_path):
    ended = run(words_of("training.seed=0,1", "launcher.partition=mian", steps=4), **slurm)
    assert ended.exit_code == 2, ended.output
    assert "launcher.partition=mian: Did you mean 'main'?" in ended.output
    assert not (tmp_path / "quickstart").exists()


def test_jobs_of_a_sweep_that_was_killed_go_on_and_are_found_again(
    start, run, slurm, read_run, words_of, tmp_path, leaves_nothing
):
    words = words_of("training.seed=0,1", steps=60)
    sweep = start(words, **slurm)
    sweep.wait_for(lambda: min(num_steps(read_run, tmp_path, trial) for trial in (0, 1)) >= 2, 200)
    os.kill(sweep.process.pid, signal.SIGKILL)
    sweep.process.wait()
    ended = run(words, 300, **slurm)
    assert ended.exit_code == 0, ended.output
    assert len(re.findall(r"is job \d+, RUNNING on node", ended.output)) == 2
    assert "submitted" not in ended.output
    for trial in (0, 1):
        assert num_steps(read_run, tmp_path, trial) == 60
        assert (sweep_folder(tmp_path) / f"trial-{trial:03d}.log").read_text().count("launch: ") == 1
    leaves_nothing(30)


def test_ctrl_c_lets_running_jobs_save_takes_waiting_ones_back_and_the_same_command_goes_on(
    start, run, slurm, in_slurm, read_run, words_of, tmp_path, leaves_nothing
):
    words = words_of("training.seed=0,1", 'launcher.extra_args=["--nodelist=node1","--exclusive"]', steps=40)
    sweep = start(words, **slurm)
    # They are submitted side by side: either may be the first.
    sweep.wait_for(lambda: max(num_steps(read_run, tmp_path, trial) for trial in (0, 1)) >= 3, 200)
    at_work = 0 if num_steps(read_run, tmp_path, 0) else 1
    assert in_slurm("squeue", "--noheader", "--states=PENDING", "--format=%T") == "PENDING"
    sweep.interrupt()
    stopped = sweep.wait(120)
    assert stopped.exit_code == 6, stopped.output
    assert in_slurm("squeue", "--noheader") == ""
    first = read_run(sweep_folder(tmp_path) / f"trial-{at_work:03d}")
    num_saved = len(first.losses)
    assert first.checkpoints == [f"checkpoint-{num_saved}"]
    assert sorted(row["exit_code"] for row in rows_of(tmp_path)) == ["", "6"]
    ended = run(words, 400, **slurm)
    assert ended.exit_code == 0, ended.output
    assert [num_steps(read_run, tmp_path, trial) for trial in (0, 1)] == [40, 40]
    logs = [(sweep_folder(tmp_path) / f"trial-{trial:03d}.log").read_text() for trial in (0, 1)]
    assert [("resuming from" in log) for log in logs] == [at_work == 0, at_work == 1]
    leaves_nothing(30)


def test_a_preempted_trial_saves_is_requeued_and_finishes(
    start, slurm, in_slurm, read_run, words_of, tmp_path, leaves_nothing
):
    sweep = start(words_of("training.seed=0,1", "--jobs=1", "launcher.partition=low", steps=40), **slurm)
    sweep.wait_for(lambda: num_steps(read_run, tmp_path, 0) >= 3, 200)
    urgent = in_slurm(
        *["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"],
        *["--wrap", "sleep 300"],
    )
    sweep.wait_for(lambda: in_slurm("squeue", "--noheader", "--format=%T", f"--job={urgent}") == "RUNNING", 90)
    assert read_run(sweep_folder(tmp_path) / "trial-000").checkpoints
    in_slurm("scancel", urgent)
    ended = sweep.wait(300)
    assert ended.exit_code == 0, ended.output
    assert [row["exit_code"] for row in rows_of(tmp_path)] == ["0", "0"]
    assert num_steps(read_run, tmp_path, 0) == 40
    assert "resuming from" in (sweep_folder(tmp_path) / "trial-000.log").read_text()
    leaves_nothing(30)


def test_a_job_that_is_killed_is_a_row_and_the_search_goes_on(
    start, slurm, in_slurm, read_run, words_of, tmp_path, leaves_nothing
):
    search = ("--search=optuna", "--num-trials=3", "--metric=final_loss", "--jobs=1")
    sweep = start(words_of("optimizer.learning_rate=tag(log,interval(1e-4,1e-2))", *search, steps=12), **slurm)
    sweep.wait_for(lambda: num_steps(read_run, tmp_path, 1) >= 1, 200)
    record = json.loads((sweep_folder(tmp_path) / "trial-001.slurm.json").read_text())
    kill_processes_of(record["job_id"])
    ended = sweep.wait(300)
    assert ended.exit_code == 1, ended.output
    rows = rows_of(tmp_path)
    assert [row["exit_code"] for row in rows] == ["0", "0", "1"]
    assert f"Slurm's job {record['job_id']} ended without recording a reason: FAILED" in rows[2]["how_it_ended"]
    leaves_nothing(30)
