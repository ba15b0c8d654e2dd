"""What runs inside a sweep's Slurm job, without Slurm around it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tunebook.errors import TunebookError
from tunebook.sweep import slurm_job
from tunebook.sweep.slurm_job import TrialJob, carry_out
from tunebook.sweep.trial_process import TrialEnd, read_trial_end, write_trial_end

# Holds its folder as a run does, and saves when asked.
TRAINS = """
import fcntl, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1]); folder.mkdir(exist_ok=True)
lock = open(folder / ".lock", "w"); fcntl.flock(lock, fcntl.LOCK_EX)
def stop(*_):
    time.sleep(0.3)
    saved = folder.parent / "saved" / "checkpoints"
    if saved.exists():
        saved.rename(folder / "checkpoints")
    sys.exit(6)
signal.signal(signal.SIGTERM, stop)
print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
(folder / "running").touch()
time.sleep(20)
"""


@pytest.fixture(autouse=True)
def requeued(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A controller that requeues every job; the jobs. Gives back the signals that a job takes over."""
    asked: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(slurm_job, "patient_requeue", lambda job_id, _say: asked.append(job_id))
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield asked
    for number, handler in before.items():
        signal.signal(number, handler)


def job(tmp_path: Path, program: str, *, is_requeued: bool = True, num_ranks: int = 1) -> TrialJob:
    folder = tmp_path / "trial-000"
    return TrialJob(
        command=[sys.executable, "-c", program, str(folder)],
        run_folder=str(folder),
        end_file=str(tmp_path / "trial-000.json"),
        output=str(tmp_path / "trial-000.log"),
        stop_file=str(tmp_path / "trial-000.stop"),
        num_ranks=num_ranks,
        is_requeued=is_requeued,
    )


def end_of(tmp_path: Path) -> TrialEnd:
    end = read_trial_end(tmp_path / "trial-000.json")
    assert end is not None
    return end


def once_it_runs(tmp_path: Path, do: Callable[[], object]) -> None:
    """Do something as soon as the trial is at work."""

    def wait() -> None:
        while not (tmp_path / "trial-000" / "running").exists():
            time.sleep(0.01)
        do()

    threading.Thread(target=wait).start()


def taken_away() -> None:
    """As Slurm does before it takes the nodes."""
    os.kill(os.getpid(), signal.SIGUSR1)


def test_its_end_is_written_down_as_the_command_of_a_job_script(tmp_path: Path) -> None:
    description = tmp_path / "job.json"
    description.write_text(json.dumps(asdict(job(tmp_path, "raise SystemExit(4)"))))
    ended = subprocess.run([sys.executable, "-m", "tunebook.sweep.slurm_job", str(description)], check=False)
    assert ended.returncode == 4
    assert (end_of(tmp_path).exit_code, end_of(tmp_path).was_interrupted) == (4, False)


def test_it_hears_from_the_sweep_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    once_it_runs(tmp_path, lambda: (tmp_path / "trial-000.stop").write_text("1"))
    assert carry_out(job(tmp_path, TRAINS, num_ranks=2)) == 6
    assert (end_of(tmp_path).exit_code, end_of(tmp_path).was_interrupted) == (6, True)
    assert (tmp_path / "trial-000.log").read_text() == "threads 4\n"  # 8 cores, 2 ranks


@pytest.mark.parametrize("is_requeued", [True, False])
def test_a_trial_saves_before_slurm_takes_the_job_away(
    tmp_path: Path, is_requeued: bool, make_checkpoint: Callable[..., Path], requeued: list[str]
) -> None:
    make_checkpoint(tmp_path / "saved", 4)
    once_it_runs(tmp_path, taken_away)
    assert carry_out(job(tmp_path, TRAINS, is_requeued=is_requeued)) == 6
    assert (tmp_path / "trial-000" / "checkpoints" / "checkpoint-4").is_dir()
    assert requeued == (["17"] if is_requeued else [])
    refused = "Slurm took the job away, and launcher.requeue=false, so it was not requeued"
    assert (end_of(tmp_path).reason or "").startswith("" if is_requeued else refused)


def test_one_that_slurm_requeues_itself_saves_and_does_not_ask_for_another_turn(
    tmp_path: Path, make_checkpoint: Callable[..., Path], requeued: list[str]
) -> None:
    make_checkpoint(tmp_path / "saved", 4)
    once_it_runs(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert carry_out(job(tmp_path, TRAINS)) == 6
    assert (requeued, end_of(tmp_path).exit_code) == ([], 6)


@pytest.mark.parametrize("is_silent", [True, False])
def test_why_a_job_was_not_requeued_is_the_reason(
    tmp_path: Path, is_silent: bool, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job_id: str, _say: object) -> str:
        if is_silent:
            raise TunebookError(f"no answer about {job_id}", problem_id="slurm-out-of-reach")
        return f"{job_id} is held"

    monkeypatch.setattr(slurm_job, "patient_requeue", refuse)
    make_checkpoint(tmp_path / "saved", 4)
    once_it_runs(tmp_path, taken_away)
    carry_out(job(tmp_path, TRAINS))
    said = "no answer about 17" if is_silent else "17 is held"
    assert end_of(tmp_path).reason == f"Slurm took the job away, and it was not requeued: {said}"


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_trial_that_came_no_further_is_not_requeued(
    tmp_path: Path, has_earlier: bool, make_checkpoint: Callable[..., Path], requeued: list[str]
) -> None:
    if has_earlier:  # of the turn before
        make_checkpoint(tmp_path / "trial-000", 2)
    once_it_runs(tmp_path, taken_away)
    carry_out(job(tmp_path, TRAINS))
    end = end_of(tmp_path)
    assert (requeued, end.exit_code, end.was_interrupted) == ([], 6, False)
    assert end.reason is not None
    assert end.reason.startswith("Slurm took the job away, and it saved nothing in this turn, so it was not requeued")


def test_a_turn_takes_away_the_end_of_the_one_before_and_counts_its_seconds(tmp_path: Path) -> None:
    end_file = tmp_path / "trial-000.json"
    write_trial_end(TrialEnd(exit_code=6, seconds=1000.0, was_interrupted=False), end_file)
    program = f"import os; raise SystemExit(int(os.path.exists({str(end_file)!r})))"
    trial = job(tmp_path, program)
    trial.earlier_s = 400.0  # which are among the 1000
    assert carry_out(trial) == 0
    assert (end_of(tmp_path).exit_code, end_of(tmp_path).seconds // 100) == (0, 10)
