"""What runs inside a sweep's Slurm job, without Slurm around it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit

from tunebook.errors import TunebookError
from tunebook.launch.slurm import client
from tunebook.sweep import slurm_job
from tunebook.sweep.slurm_job import TrialJob
from tunebook.sweep.trial_process import TrialEnd, read_trial_end, write_trial_end

# Holds its folder as a run does, saves when asked, and ends with 6; survives the signal that submitit is sent.
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
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A controller that answers; collects what it was asked for, in the place of Slurm."""
    asked: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(client, "job_state", asked.append)
    return asked


def job(tmp_path: Path, program: str, *, is_requeued: bool = True, num_ranks: int = 1) -> TrialJob:
    folder = tmp_path / "trial-000"
    return TrialJob(
        command=[sys.executable, "-c", program, str(folder)],
        run_folder=folder,
        end_file=tmp_path / "trial-000.json",
        output=tmp_path / "trial-000.log",
        stop_file=tmp_path / "trial-000.stop",
        num_ranks=num_ranks,
        is_requeued=is_requeued,
    )


def in_thread(trial: TrialJob, folder: Path) -> threading.Thread:
    thread = threading.Thread(target=trial)
    thread.start()
    while not (folder / "running").exists():
        time.sleep(0.01)
    return thread


def test_its_end_is_written_down(tmp_path: Path) -> None:
    assert job(tmp_path, "raise SystemExit(4)")() == 4
    end = read_trial_end(tmp_path / "trial-000.json")
    assert end is not None
    assert (end.exit_code, end.was_interrupted) == (4, False)


def test_it_hears_from_the_sweep_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    thread = in_thread(job(tmp_path, TRAINS, num_ranks=2), tmp_path / "trial-000")
    (tmp_path / "trial-000.stop").write_text("1")
    thread.join(10)
    end = read_trial_end(tmp_path / "trial-000.json")
    assert end is not None
    assert (end.exit_code, end.was_interrupted) == (6, True)
    assert (tmp_path / "trial-000.log").read_text() == "threads 4\n"  # 8 cores, 2 ranks


@pytest.mark.parametrize("is_requeued", [True, False])
def test_a_trial_saves_before_slurm_takes_the_job_away(
    tmp_path: Path, is_requeued: bool, make_checkpoint: Callable[..., Path], answers: list[str]
) -> None:
    make_checkpoint(tmp_path / "saved", 4)
    trial = job(tmp_path, TRAINS, is_requeued=is_requeued)
    thread = in_thread(trial, tmp_path / "trial-000")
    again = trial.checkpoint()
    assert (tmp_path / "trial-000" / "checkpoints" / "checkpoint-4").is_dir()
    thread.join(10)
    assert (again is not None) is is_requeued
    assert answers == (["17"] if is_requeued else [])
    if isinstance(again, submitit.helpers.DelayedSubmission):
        again.dump(tmp_path / "pickle")  # submitit brings it to the next turn in this form
        restored = submitit.core.utils.DelayedSubmission.load(tmp_path / "pickle").function
        assert restored.command == trial.command


@pytest.mark.parametrize("is_back", [True, False])
def test_a_controller_that_is_silent_when_the_job_is_taken_away_is_waited_for(
    tmp_path: Path, is_back: bool, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    def answer(job_id: str) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 4 or not is_back:
            raise TunebookError(f"no answer about {job_id}", problem_id="slurm-out-of-reach")

    monkeypatch.setattr(client, "job_state", answer)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    monkeypatch.setattr(client, "SILENT_WITHIN_S", 600.0 if is_back else 0.05)
    make_checkpoint(tmp_path / "trial-000", 4)
    again = job(tmp_path, "pass").checkpoint()
    assert (again is not None) is is_back
    end = read_trial_end(tmp_path / "trial-000.json")
    if is_back:
        assert (num_asked, end) == (4, None)
    else:
        assert end is not None
        assert end.reason == "Slurm took the job away, and it was not requeued: no answer about 17"


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_trial_that_came_no_further_is_not_requeued(
    tmp_path: Path, has_earlier: bool, make_checkpoint: Callable[..., Path]
) -> None:
    if has_earlier:  # of the turn before
        make_checkpoint(tmp_path / "trial-000", 2)
    trial = job(tmp_path, TRAINS)
    thread = in_thread(trial, tmp_path / "trial-000")
    assert trial.checkpoint() is None
    end = read_trial_end(tmp_path / "trial-000.json")
    thread.join(10)
    assert end is not None
    assert end.exit_code == 6
    assert end.reason is not None
    assert end.reason.startswith("Slurm took the job away, and it saved nothing in this turn, so it was not requeued")


def test_submitits_signal_ends_no_process_of_the_trial(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR2)"
    assert job(tmp_path, program)() == 0
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_turn_takes_away_the_end_of_the_one_before_and_counts_its_seconds(tmp_path: Path) -> None:
    """Slurm requeued the job by SIGTERM, so that its trial had saved and written down that it was stopped."""
    end_file = tmp_path / "trial-000.json"
    write_trial_end(TrialEnd(exit_code=6, seconds=1000.0, was_interrupted=False), end_file)
    program = f"import os; raise SystemExit(int(os.path.exists({str(end_file)!r})))"
    trial = job(tmp_path, program)
    trial.earlier_s = 400.0  # which are among the 1000
    assert trial() == 0
    end = read_trial_end(end_file)
    assert end is not None
    assert (end.exit_code, end.seconds // 100) == (0, 10)


def test_a_turn_that_slurm_ends_counts_in_the_next(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "trial-000", 4)
    times = iter([100.0, 130.0])
    trial = job(tmp_path, "pass")
    trial.earlier_s = 7.0
    monkeypatch.setattr(
        slurm_job, "run_trial", lambda *_, **__: TrialEnd(exit_code=6, seconds=0, was_interrupted=False)
    )
    monkeypatch.setattr(slurm_job, "time", SimpleNamespace(monotonic=lambda: next(times)))
    trial()
    (tmp_path / "trial-000.json").unlink()
    trial._before = None
    again = trial.checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function.earlier_s == 37.0
