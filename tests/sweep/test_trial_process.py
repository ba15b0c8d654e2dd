from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tunebook.record.run_folder import working_in
from tunebook.sweep.trial_process import (
    Stopping,
    TrialEnd,
    read_trial_end,
    run_trial,
    train_command,
    wait_until_free,
    write_trial_end,
)

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
# Notes which requests come, and heeds none.
IGNORES_REQUESTS = """
import pathlib, signal, sys, time
def note(number, frame):
    with pathlib.Path(sys.argv[1], "noted").open("a") as file:
        file.write(signal.Signals(number).name + " ")
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
pathlib.Path(sys.argv[1], "running").touch()
end = time.monotonic() + 60
while time.monotonic() < end:
    time.sleep(1)
"""
# A sweep of one trial, to be killed.
SWEEP = """
import sys
from tunebook.sweep.trial_process import Stopping, run_trial

run_trial([sys.executable, "-c", sys.argv[1], sys.argv[2]], Stopping())
"""


def python(program: str, *words: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, words)]


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_the_command_is_what_a_user_would_type() -> None:
    assert train_command("mine", ["a=1", "b=[1,2]"], Path("/out/trial-000"), [Path("/recipes")]) == [
        *(sys.executable, "-m", "tunebook", "train", "mine", "a=1", "b=[1,2]"),
        *("--recipes-dir", "/recipes", "--run-folder", "/out/trial-000"),
    ]
    assert train_command(None, ["a=1"], Path("/o"), [])[4:] == ["a=1", "--run-folder", "/o"]


@pytest.mark.parametrize(("program", "exit_code"), [("pass", 0), ("raise SystemExit(7)", 7), ("1/0", 1)])
def test_an_end_is_a_value(tmp_path: Path, program: str, exit_code: int) -> None:
    end = run_trial(python(program), Stopping(), output=tmp_path / "out.log")
    assert (end.exit_code, end.was_interrupted, end.was_pruned, end.reason) == (exit_code, False, False, None)
    assert ("ZeroDivisionError" in (tmp_path / "out.log").read_text()) is (exit_code == 1)


def test_a_killed_trial_counts_as_1_and_says_so(tmp_path: Path) -> None:
    end = run_trial(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), Stopping())
    assert (end.exit_code, end.reason) == (1, "its process was killed by signal 9")


def test_what_is_printed_is_added_to_what_an_earlier_attempt_printed(tmp_path: Path) -> None:
    for text in ("first", "second"):
        run_trial(python(f"print('{text}')"), Stopping(), output=tmp_path / "out.log")
    assert (tmp_path / "out.log").read_text() == "first\nsecond\n"


def test_an_end_is_read_back_and_one_of_an_older_version_too(tmp_path: Path) -> None:
    assert read_trial_end(tmp_path / "end.json") is None
    end = TrialEnd(exit_code=6, seconds=2.0, was_interrupted=True, was_pruned=True, reason="why")
    write_trial_end(end, tmp_path / "end.json")
    assert read_trial_end(tmp_path / "end.json") == end
    (tmp_path / "end.json").write_text('{"exit_code": 0, "seconds": 1.5, "was_interrupted": false}')
    assert read_trial_end(tmp_path / "end.json") == TrialEnd(exit_code=0, seconds=1.5, was_interrupted=False)


def interrupt_when(file: Path, *, times: int = 1) -> threading.Thread:
    """Send this process Ctrl-C once the file is there, and again each time that one has been noted beside it."""
    noted = file.with_name("noted")

    def watch() -> None:
        wait_for(file)
        for count in range(times):
            while count and not (noted.exists() and noted.read_text().count(" ") == count):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_lets_the_trial_save_and_is_remembered(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    stopping = Stopping()
    watcher = interrupt_when(tmp_path / "running")
    with stopping.listening():
        end = run_trial(python(STOPS_CLEANLY, tmp_path), stopping)
    watcher.join()
    assert (tmp_path / "saved").exists()
    assert (end.exit_code, end.was_interrupted, stopping.num_requests) == (6, True, 1)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_third_ctrl_c_kills_a_trial_that_does_not_stop(tmp_path: Path) -> None:
    stopping = Stopping()
    watcher = interrupt_when(tmp_path / "running", times=3)
    with stopping.listening():
        end = run_trial(python(IGNORES_REQUESTS, tmp_path), stopping)
    watcher.join()
    assert (end.exit_code, end.was_interrupted) == (1, True)
    assert end.seconds < 60
    # The second by another signal: SIGTERM also comes several times for one reason.
    assert (tmp_path / "noted").read_text().split() == ["SIGTERM", "SIGINT"]


def test_a_trial_that_starts_after_the_request_is_stopped_too(tmp_path: Path) -> None:
    stopping = Stopping()
    stopping.request()
    end = run_trial(python("import time; time.sleep(300)"), stopping)
    assert end.was_interrupted
    assert end.seconds < 60


def test_what_watches_ends_a_trial_early_and_says_why(tmp_path: Path) -> None:
    def look() -> str | None:
        return "worse than the others" if (tmp_path / "running").exists() else None

    end = run_trial(python(STOPS_CLEANLY, tmp_path), Stopping(), watch=look)
    assert (end.exit_code, end.was_pruned, end.reason) == (6, True, "worse than the others")
    assert not end.was_interrupted


def test_a_trial_that_finishes_all_the_same_is_not_pruned(tmp_path: Path) -> None:
    finishes = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(2.5)"
    )
    ready = tmp_path / "ready"
    end = run_trial(python(finishes, ready), Stopping(), watch=lambda: "worse" if ready.exists() else None)
    assert (end.exit_code, end.was_pruned) == (0, False)


def test_a_trial_runs_on_its_cores_alone_and_so_do_its_children(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    program = (
        "import os, subprocess, sys, time; time.sleep(0.5); print(sorted(os.sched_getaffinity(0)), flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(sorted(os.sched_getaffinity(0)))'])"
    )
    run_trial(python(program), Stopping(), output=tmp_path / "out.log", cores=[core])
    assert (tmp_path / "out.log").read_text() == f"[{core}]\n[{core}]\n"


def test_a_trial_is_asked_to_save_when_its_sweep_is_killed(tmp_path: Path) -> None:
    sweep = subprocess.Popen(python(SWEEP, STOPS_CLEANLY, tmp_path))
    wait_for(tmp_path / "running")
    sweep.kill()
    sweep.wait()
    end = time.monotonic() + 10
    while not (tmp_path / "saved").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / "saved").exists()


def test_a_folder_is_free_once_nobody_holds_it(tmp_path: Path) -> None:
    said: list[str] = []
    assert wait_until_free(tmp_path / "nothing")
    with working_in(tmp_path):
        waiting = threading.Thread(target=wait_until_free, args=(tmp_path, lambda: said.append("waits")))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    assert said == ["waits"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_request_reaches_every_trial_that_runs(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT)
    stopping = Stopping()
    asked: list[tuple[str, int]] = []
    with (
        stopping.listening(),
        stopping.asking(lambda count: asked.append(("one", count))),
    ):
        os.kill(os.getpid(), number)
        with stopping.asking(lambda count: asked.append(("other", count))):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert asked == [("one", 1), ("other", 1), ("one", 2), ("other", 2), ("one", 3)]
    assert stopping.num_requests == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_comes_several_times_for_one_reason_is_one_request(number: signal.Signals) -> None:
    stopping = Stopping()
    asked: list[int] = []
    with stopping.listening(), stopping.asking(asked.append):
        for _ in range(3):
            os.kill(os.getpid(), number)
    assert asked == [1]


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stopping = Stopping()
        with stopping.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopping.num_requests == 0
    finally:
        signal.signal(signal.SIGHUP, before)
