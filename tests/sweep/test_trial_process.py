from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tunebook.sweep.trial_process import TrialEnd, read_trial_end, run_trial, train_command
from tunebook.sweep.trials import Trial

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
IGNORES_REQUESTS = STOPS_CLEANLY.replace("raise SystemExit(6)", "pass").replace("(30)", "(15); time.sleep(15)")


def test_the_command_is_what_a_user_would_type() -> None:
    trial = Trial(number=0, overrides=("a=1", "b=[1,2]"), swept={"a": "1"})
    assert train_command("mine", trial, Path("/out/trial-000"), [Path("/recipes")]) == [
        *(sys.executable, "-m", "tunebook", "train", "mine", "a=1", "b=[1,2]"),
        *("--recipes-dir", "/recipes", "--run-folder", "/out/trial-000"),
    ]
    assert train_command(None, trial, Path("/o"), [])[4:] == ["a=1", "b=[1,2]", "--run-folder", "/o"]


@pytest.mark.parametrize(("program", "exit_code"), [("pass", 0), ("raise SystemExit(7)", 7), ("1/0", 1)])
def test_an_end_is_a_value(tmp_path: Path, program: str, exit_code: int) -> None:
    run_trial([sys.executable, "-c", program], tmp_path / "end.json", tmp_path / "out.log")
    end = read_trial_end(tmp_path / "end.json")
    assert end is not None
    assert (end.exit_code, end.was_interrupted) == (exit_code, False)
    assert ("ZeroDivisionError" in (tmp_path / "out.log").read_text()) is (exit_code == 1)


def test_a_killed_trial_counts_as_1(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    run_trial([sys.executable, "-c", program], tmp_path / "end.json", None)
    end = read_trial_end(tmp_path / "end.json")
    assert end is not None
    assert end.exit_code == 1


def test_a_trial_that_never_ended_has_no_end(tmp_path: Path) -> None:
    assert read_trial_end(tmp_path / "end.json") is None


def interrupt_when(file: Path, *, times: int = 1) -> threading.Thread:
    """Send this process Ctrl-C once the file is there, and again after a pause."""

    def watch() -> None:
        while not file.exists():
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_lets_the_trial_save_and_is_passed_on_afterwards(tmp_path: Path) -> None:
    watcher = interrupt_when(tmp_path / "running")
    with pytest.raises(KeyboardInterrupt):
        run_trial([sys.executable, "-c", STOPS_CLEANLY, str(tmp_path)], tmp_path / "end.json", None)
    watcher.join()
    assert (tmp_path / "saved").exists()
    end = read_trial_end(tmp_path / "end.json")
    assert end == TrialEnd(exit_code=6, seconds=end.seconds if end else 0.0, was_interrupted=True)


def test_a_third_ctrl_c_kills_a_trial_that_does_not_stop(tmp_path: Path) -> None:
    started = time.monotonic()
    watcher = interrupt_when(tmp_path / "running", times=3)
    with pytest.raises(KeyboardInterrupt):
        run_trial([sys.executable, "-c", IGNORES_REQUESTS, str(tmp_path)], tmp_path / "end.json", None)
    watcher.join()
    end = read_trial_end(tmp_path / "end.json")
    assert end is not None
    assert (end.exit_code, end.was_interrupted) == (1, True)
    assert time.monotonic() - started < 10
