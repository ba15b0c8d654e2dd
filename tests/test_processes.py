"""Programs that are run with a time limit, and those that end with what started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tunebook.processes import EarlyStart, ask, children_of

from .conftest import wait_for

# Starts the command that follows through the module under test, says its process, and waits.
PARENT_THAT_IS_KILLED = """
import os, sys, time
from tunebook.processes import start

child = start(sys.argv[1:], os.environ)
print(child.pid, flush=True)
time.sleep(60)
"""
# As torchrun: starts a rank in a session of its own, which has its input.
AGENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
"""
# Says when it is there, and writes down that it was asked to stop.
CHILD = """
import pathlib, signal, sys, time
from tunebook.processes import stop_when_input_ends
def stop(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(6)
signal.signal(signal.SIGTERM, stop)
stop_when_input_ends()
pathlib.Path(sys.argv[1]).write_text("there")
time.sleep(60)
"""
PYTHON = (sys.executable, "-c")


def test_a_rank_is_asked_to_stop_when_its_launcher_is_killed(tmp_path):
    says = tmp_path / "says"
    words = [*PYTHON, PARENT_THAT_IS_KILLED, *PYTHON, AGENT, CHILD, str(says)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        int(parent.stdout.readline())
        wait_for(lambda: says.exists() and says.read_text() == "there")
        parent.kill()
    wait_for(lambda: says.read_text() == "SIGTERM")


# Writes down what it was started with and then given, and that it was asked to stop.
EARLY = """
import os, pathlib, signal, sys, time
from tunebook.processes import last_argument, stop_when_input_ends
says = pathlib.Path(os.environ["SAYS"])
says.write_text("early")
argument = last_argument()
def stop(number, frame):
    says.write_text("asked to stop")
    sys.exit(6)
signal.signal(signal.SIGTERM, stop)
stop_when_input_ends()
says.write_text(f"got {argument}")
time.sleep(60)
"""


def test_a_process_that_started_early_gets_its_last_argument_and_open_files(tmp_path) -> None:
    says = tmp_path / "says"
    environment = {**os.environ, "SAYS": str(says)}
    reading, writing = os.pipe()
    with EarlyStart() as early:
        early.start([*PYTHON, EARLY], environment)
        wait_for(lambda: says.exists() and says.read_text() == "early")
        process = early.hand_over([*PYTHON, EARLY, "/runs/1"], environment | {"LATER": "1"}, [writing])
    os.close(writing)
    assert process is not None
    wait_for(lambda: says.read_text() == "got /runs/1")
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):  # the other end is open in the process
        os.read(reading, 1)
    with process:  # its input ends, as if this process had been killed
        pass
    assert (process.returncode, says.read_text(), os.read(reading, 1)) == (6, "asked to stop", b"")
    os.close(reading)


@pytest.mark.parametrize("change", ["command", "environment", "nothing"])
def test_a_process_that_started_early_is_killed_if_it_is_not_used(change, tmp_path) -> None:
    environment = {**os.environ, "SAYS": str(tmp_path / "says")}
    command = [*PYTHON, "another" if change == "command" else EARLY, "/runs/1"]
    with EarlyStart() as early:
        early.start([*PYTHON, EARLY], environment)
        (child,) = children_of(os.getpid())
        if change != "nothing":
            changed = {"SAYS": "elsewhere"} if change == "environment" else {}
            assert early.hand_over(command, environment | changed) is None
            assert not is_alive(child)
    assert not is_alive(child)


def test_a_process_that_started_early_and_failed_is_not_handed_over() -> None:
    with EarlyStart() as early:
        early.start([*PYTHON, "raise SystemExit(1)"], os.environ)
        (child,) = children_of(os.getpid())
        wait_for(lambda: not is_alive(child))
        assert early.hand_over([*PYTHON, "raise SystemExit(1)", "/runs/1"], os.environ) is None


def test_an_answer() -> None:
    answer = ask([*PYTHON, "import sys; print('42'); print('by the way', file=sys.stderr)"], timeout_s=30)
    assert (answer.text, answer.errors, answer.problem, answer.is_late) == ("42\n", "by the way\n", None, False)


def test_a_failure_has_its_last_words() -> None:
    code = "import sys; print('a table'); print('first\\nlast', file=sys.stderr); sys.exit(9)"
    answer = ask([*PYTHON, code], timeout_s=30)
    assert (answer.problem, answer.last_words, answer.text) == ("it ended with exit code 9", "last", "a table\n")


def test_hanging_process_is_killed_with_its_children_and_its_output_kept(tmp_path) -> None:
    child = tmp_path / "child"
    script = f"echo before; sleep 300 & echo $! > {child}; trap '' TERM; wait"
    start = time.monotonic()
    answer = ask(["sh", "-c", script], timeout_s=1)
    assert time.monotonic() - start < 60  # far below its 300 s
    assert (answer.problem, answer.is_late, answer.text) == ("no answer within 1 s", True, "before\n")
    pid = int(child.read_text())
    wait_for(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123  one read
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_no_text_is_no_error() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfe NV')"
    assert ask([*PYTHON, code], timeout_s=30).text.endswith(" NV")
