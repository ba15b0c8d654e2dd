"""Trials as processes, with small programs in the place of `tunebook train`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
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
def stop(number, frame):
    pathlib.Path(sys.argv[1], "saved").touch()
    raise SystemExit(6)
signal.signal(signal.SIGTERM, stop)
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


def study_in(folder: Path, overrides: list[str], **values: object) -> Study:
    sweep = Sweep(
        recipe="mine",
        recipes_dirs=["/recipes"],
        overrides=overrides,
        config_sha256="0",
        num_trials=None,
        metric="final_loss",
        **values,  # type: ignore[arg-type]
    )
    study = Study(folder, sweep)
    study.enqueue_grid()
    return study


def run_program(
    program: str, folder: Path, slots: Sequence[dict[str, str]] = ({},), *, num_trials: int, **values: int
) -> list[TrialResult | None]:
    """Run the program once per trial, with the sweep's folder and the trial's number as its arguments."""
    seeds = ",".join(map(str, range(num_trials)))
    study, stop = study_in(folder, [f"training.seed=choice({seeds})"], **values), StopRequests()

    def command_of(_study: Study, trial: optuna.Trial) -> list[str]:
        return [sys.executable, "-S", "-c", program, str(folder), str(trial.number)]

    with stop.listening():
        run_trials(study, slots, stop, print, command_of)
    return [row.result for row in study.rows()]


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
    study = study_in(tmp_path, ["launcher=slurm", "launcher.partition=a", "a=1,2"], is_array=is_array)
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
    run_program(program, tmp_path, divide(["GPU-a", "GPU-b", "GPU-c", "GPU-d"], 2), num_trials=4)
    visible = [(tmp_path / str(number)).read_text() for number in range(4)]
    assert set(visible) == set(visible[:2]) == {"GPU-a,GPU-b", "GPU-c,GPU-d"}


def test_an_end_is_a_row(tmp_path: Path) -> None:
    program = """
import os, sys
if sys.argv[2] == "1":
    sys.exit(7)
if sys.argv[2] == "2":
    1 / 0
if sys.argv[2] == "3":
    os.kill(os.getpid(), 9)
"""
    results = [result for result in run_program(program, tmp_path, num_trials=4) if result is not None]
    assert [result.exit_code for result in results] == [0, 7, 1, 1]
    assert "ZeroDivisionError" in results[2].how_it_ended
    assert "killed by signal 9" in results[3].how_it_ended


def test_ctrl_c_lets_the_trial_save_and_starts_no_other(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    watcher = interrupt_when(tmp_path / "running")
    stopped, other = run_program(STOPS_CLEANLY, tmp_path, num_trials=2)
    watcher.join()
    assert (tmp_path / "saved").exists()
    assert stopped is not None
    assert (stopped.exit_code, stopped.how_it_ended, other) == (6, "stopped by SIGINT", None)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_kills_a_trial_that_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebook.launch.supervise._SAME_WITHIN_S", 0.2)
    watcher = interrupt_when(tmp_path / "running", times=2)
    (result,) = run_program(IGNORES_REQUESTS, tmp_path, num_trials=1)
    watcher.join()
    assert result is not None
    assert (result.exit_code, result.how_it_ended) == (6, "stopped by SIGINT")


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
    *finished, pruned = run_program(program, tmp_path, num_trials=6, prune=2)
    assert [result and result.exit_code for result in finished] == [0] * 5
    assert pruned is not None
    assert pruned.how_it_ended.startswith("pruned at step 3: final_loss")
    assert (tmp_path / "sweep.csv").read_text().count("pruned") == 1
