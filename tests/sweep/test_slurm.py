"""Trials as tasks of a job array, without Slurm; tests/system/cluster has a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from tunebook.config.compose import compose
from tunebook.errors import TunebookError
from tunebook.sweep import slurm as module
from tunebook.sweep.slurm import queued_array, run_task, submit_array
from tunebook.sweep.study import Study, Sweep, write_sweep

# Notes that it ran. Where the seed is 1 it saves a checkpoint, and asks its task to stop, once.
TRAINS = """
import os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
is_first = not folder.exists()
with (folder.parent / "started").open("a") as file:
    file.write(folder.name + " ")
if sys.argv[2] == "1" and is_first:
    checkpoint = folder / "checkpoints" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    os.kill(os.getppid(), signal.SIGUSR1)
    signal.pause()
"""


def command_of(study: Study, trial: optuna.Trial) -> list[str]:
    return [sys.executable, "-c", TRAINS, str(study.run_folder(trial.number)), trial.params["training.seed"]]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    sweep = Sweep(
        recipe="quickstart",
        recipes_dirs=[],
        overrides=["launcher=slurm", "training.seed=0,1,2"],
        config_sha256="0",
        num_trials=None,
        metric="final_loss",
        is_array=True,
    )
    write_sweep(sweep, tmp_path)
    study = Study(tmp_path, sweep)
    study.enqueue_grid()
    return study


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were requeued."""
    found: list[str] = []
    monkeypatch.setattr(module, "requeue", lambda job_id, _say: found.append(job_id))
    monkeypatch.setattr(module, "newest_checkpoint", lambda folder: next(folder.glob("checkpoints/*"), None))
    return found


def run_as(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    job_id, _, index = task.partition("_")
    for name, value in {"ARRAY_JOB_ID": job_id, "ARRAY_TASK_ID": index, "JOB_ID": f"1{index}"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return run_task(folder, command_of)


def test_each_task_runs_one_trial_and_one_that_saved_is_requeued_and_resumes(
    study: Study, requeued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_as("9_0", study.folder, monkeypatch) == 0
    assert run_as("9_1", study.folder, monkeypatch) == 6
    assert requeued == ["11"]
    assert run_as("9_2", study.folder, monkeypatch) == 0
    assert run_as("9_1", study.folder, monkeypatch) == 0
    assert (study.folder / "started").read_text().split() == [f"trial-{number:03d}" for number in (0, 1, 2, 1)]
    assert requeued == ["11"]
    assert [row.exit_code for row in Study(study.folder, study.sweep).rows()] == [0, 0, 0]
    assert run_as("9_3", study.folder, monkeypatch) == 0  # nothing is left
    assert len((study.folder / "started").read_text().split()) == 4


def test_an_array_has_a_task_for_each_trial_that_is_left(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    study.next_trial()
    study.finish(0, 0, seconds=1.0)
    config = compose("quickstart", ["hardware=cpu", "hardware.gpus_per_node=1", "launcher=slurm"]).config
    monkeypatch.setattr(module, "submit_script", lambda script: "17")
    assert submit_array(study, config, 2) == "17"
    script = (study.folder / "array.sh").read_text()
    assert "#SBATCH --array=1-2%2\n" in script
    assert f"#SBATCH --output={study.folder}/slurm-%A_%a.out\n" in script
    assert f"-m tunebook.sweep.slurm {study.folder}\n" in script
    assert subprocess.run(["bash", "-n", str(study.folder / "array.sh")]).returncode == 0
    assert json.loads((study.folder / "slurm.json").read_text()) == {"job_id": "17"}


@pytest.mark.parametrize(
    ("program", "queued"),
    [
        ("echo 17_1 main", "17"),
        ("exit 0", None),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", None),
        ("echo Unable to contact slurm controller >&2; exit 1", "slurm-out-of-reach"),
    ],
)
def test_a_queued_array_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, queued: str | None
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{program}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert queued_array(tmp_path) is None
    (tmp_path / "slurm.json").write_text('{"job_id": "17"}')
    if queued == "slurm-out-of-reach":
        with pytest.raises(TunebookError) as raised:
            queued_array(tmp_path)
        assert raised.value.problem_id == queued
    else:
        assert queued_array(tmp_path) == queued
