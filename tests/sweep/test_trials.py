"""Trials as processes, with small programs in the place of `tunebook train`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import optuna
import pytest

from tunebook.launch.supervise import StopRequests
from tunebook.sweep.study import Study, Sweep
from tunebook.sweep.table import TrialResult
from tunebook.sweep.trials import divide, run_trials, train_command

# Ends as a run does that is asked to stop: cleanly, with 6.
STOPS_CLEANLY = """
import pathlib, signal, sys, time
from tunebook.processes import stop_when_input_ends
def stop(number, frame):
    pathlib.Path(sys.argv[1], "saved").touch()
    raise SystemExit(6)
signal.signal(signal.SIGTERM, stop)
stop_when_input_ends()
pathlib.Path(sys.argv[1], "running").touch()
time.sleep(30)
"""
IGNORES_REQUESTS = """
import pathlib, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "running").touch()
time.sleep(600)
"""
# A sweep of one trial, to be killed.
SWEEP = """
import sys
from tests.sweep.test_trials import run_program
run_program(sys.argv[1], sys.argv[2])
"""


def study_in(folder: Path, num_trials: int = 1, **values: object) -> Study:
    sweep = Sweep(
        recipe="mine",
        recipes_dirs=["/recipes"],
        words=[f"training.seed=range({num_trials})"] if num_trials > 1 else ["training.seed=choice(0)"],
        config_sha256="0",
        num_trials=None,
        metric="final_loss",
        **values,  # type: ignore[arg-type]
    )
    study = Study(folder, sweep)
    study.enqueue_grid()
    return study


def run_program(program: str, folder: str, slots: int = 1, **values: int) -> list[TrialResult | None]:
    """Run the program once per trial, with the sweep's folder and the trial's number as its arguments."""
    study, stop = study_in(Path(folder), **values), StopRequests()

    def command_of(_study: Study, trial: optuna.Trial) -> list[str]:
        return [sys.executable, "-c", program, folder, str(trial.number)]

    with stop.listening():
        run_trials(study, divide([], slots), stop, print, command_of)
    return [row.result for row in study.rows()]


def run_one(program: str, folder: Path) -> TrialResult:
    (result,) = run_program(program, str(folder))
    assert result is not None
    return result


def interrupt_when(file: Path, *, times: int = 1) -> threading.Thread:
    """Send this process Ctrl-C once the file is there, and some time later again."""

    def watch() -> None:
        while not file.exists():
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("is_array", "overrides"),
    [(False, ["launcher=slurm", "launcher.partition=a", "a=1"]), (True, ["a=1", "launcher=local"])],
)
def test_the_command_is_what_a_user_would_type(tmp_path: Path, is_array: bool, overrides: list[str]) -> None:
    words = ["launcher=slurm", "launcher.partition=a", "a=1,2"]
    sweep = Sweep(
        recipe="mine",
        recipes_dirs=["/recipes"],
        words=words,
        config_sha256="0",
        num_trials=None,
        metric="seconds",
        is_array=is_array,
    )
    study = Study(tmp_path, sweep)
    study.enqueue_grid()
    trial = study.next_trial()
    assert trial is not None
    assert train_command(study, trial) == [
        *(sys.executable, "-m", "tunebook", "train", "mine", *overrides),
        *("--recipes-dir", "/recipes", "--run-folder", str(tmp_path / "trial-000")),
    ]


def test_a_machine_is_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("tunebook.sweep.trials.own_cores", lambda: [0, 1, 2, 3, 4])
    assert divide(["a", "b"], 1) == [{}]
    assert divide(["a", "b", "c", "d", "e"], 2) == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "a,b"},
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "c,d"},
    ]
    assert divide([], 2) == [{"OMP_NUM_THREADS": "2"}] * 2


def test_trials_side_by_side_see_gpus_of_their_own(tmp_path: Path) -> None:
    program = "import os, sys; open(f'{sys.argv[1]}/{sys.argv[2]}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    study, stop = study_in(tmp_path, 4), StopRequests()
    run_trials(
        study,
        divide(["GPU-a", "GPU-b", "GPU-c", "GPU-d"], 2),
        stop,
        print,
        lambda _study, trial: [sys.executable, "-c", program, str(tmp_path), str(trial.number)],
    )
    seen = [(tmp_path / str(number)).read_text() for number in range(4)]
    assert set(seen) == {"GPU-a,GPU-b", "GPU-c,GPU-d"}
    assert set(seen[:2]) == set(seen)


@pytest.mark.parametrize(
    ("program", "exit_code", "how"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(7)", 7, "it printed nothing"),
        ("1/0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", 1, "killed by signal 9"),
    ],
)
def test_an_end_is_a_row(tmp_path: Path, program: str, exit_code: int, how: str) -> None:
    result = run_one(program, tmp_path)
    assert result.exit_code == exit_code
    assert how in result.how_it_ended


def test_ctrl_c_lets_the_trial_save_and_starts_no_other(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    watcher = interrupt_when(tmp_path / "running")
    stopped, other = run_program(STOPS_CLEANLY, str(tmp_path), num_trials=2)
    watcher.join()
    assert (tmp_path / "saved").exists()
    assert stopped is not None
    assert (stopped.exit_code, stopped.how_it_ended, other) == (6, "stopped by SIGINT", None)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_kills_a_trial_that_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebook.launch.supervise._SAME_WITHIN_S", 0.2)
    watcher = interrupt_when(tmp_path / "running", times=2)
    result = run_one(IGNORES_REQUESTS, tmp_path)
    watcher.join()
    assert (result.exit_code, result.how_it_ended) == (6, "stopped by SIGINT")


def test_a_trial_is_asked_to_save_when_its_sweep_is_killed(tmp_path: Path) -> None:
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP, STOPS_CLEANLY, str(tmp_path)])
    while not (tmp_path / "running").exists():
        time.sleep(0.05)
    sweep.kill()
    sweep.wait()
    end = time.monotonic() + 10
    while not (tmp_path / "saved").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / "saved").exists()


def test_a_trial_worse_than_the_others_is_pruned(tmp_path: Path) -> None:
    # Six trials log their number as the loss; the last one is the worst, and waits to be stopped.
    program = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
folder = pathlib.Path(sys.argv[1], f"trial-{int(sys.argv[2]):03d}")
folder.mkdir()
(folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": float(sys.argv[2])}) + "\\n")
time.sleep(30 if sys.argv[2] == "5" else 0)
"""
    study, stop = study_in(tmp_path, 6, prune=2), StopRequests()
    run_trials(
        study,
        [{}],
        stop,
        print,
        lambda _study, trial: [sys.executable, "-c", program, str(tmp_path), str(trial.number)],
    )
    *finished, pruned = [row.result for row in study.rows()]
    assert [one and one.exit_code for one in finished] == [0] * 5
    assert pruned is not None
    assert pruned.how_it_ended.startswith("pruned at step 3: final_loss")
    assert study.num_open == 0
