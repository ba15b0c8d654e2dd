"""Orphaned processes are adopted, asked to end, and killed if they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tunebook
from tunebook.processes import adopting_orphans, ask, children_of, descendants_of, end_children, stopping_with_parent
from tunebook.train import rank_process

from .conftest import wait_for

# Starts a child in a session of its own, says who that is, and dies.
PARENT = """
import subprocess, sys
pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, **pipes)
child.stdout.readline()
print(child.pid, flush=True)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
POLITE = "import time; print(flush=True); time.sleep(60)"
# Starts the command that follows through the module under test, says its process, and waits.
PARENT_THAT_IS_KILLED = """
import subprocess, sys, time
from tunebook.processes import stopping_with_parent

child = subprocess.Popen(stopping_with_parent(sys.argv[1:]))
print(child.pid, flush=True)
time.sleep(60)
"""
# Says when it is there, and writes down that it was asked to stop.
CHILD = """
import pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(6)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text("there")
time.sleep(60)
"""
PYTHON = (sys.executable, "-c")


def orphan(program):
    answer = subprocess.run([sys.executable, "-c", PARENT, program], capture_output=True, text=True, check=True)
    return int(answer.stdout)


def test_an_orphan_is_adopted_and_asked_to_end():
    with adopting_orphans():
        before = set(children_of(os.getpid()))
        process = orphan(POLITE)
        assert process in children_of(os.getpid())
        end_children(exclude=before, timeout_s=30)
        assert process not in children_of(os.getpid())


def test_one_that_does_not_end_is_killed_in_time():
    with adopting_orphans():
        before = set(children_of(os.getpid()))
        process = orphan(STUBBORN)
        started = time.monotonic()
        end_children(exclude=before, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 10
    assert not os.path.exists(f"/proc/{process}")  # noqa: PTH110


# Its main thread ends at once, and the process counts as a zombie, while another thread runs on. As with a killed rank
# of many threads, but for longer.
WITHOUT_MAIN_THREAD = """
import ctypes, threading, time, os
threading.Thread(target=time.sleep, args=(1.0,)).start()
os.close(1)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_one_whose_other_threads_run_on_is_waited_for():
    with adopting_orphans():
        before = set(children_of(os.getpid()))
        process = orphan(WITHOUT_MAIN_THREAD)
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        end_children(exclude=before, timeout_s=30)
    assert not os.path.exists(f"/proc/{process}")  # noqa: PTH110


def test_children_for_other_reasons_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    end_children(exclude={*children_of(os.getpid())}, timeout_s=0)
    assert other.poll() is None
    other.communicate(b"\n")


def test_all_descendants_are_found():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    (child,) = children_of(process.pid)
    assert descendants_of(process.pid) == [child]
    assert set(descendants_of(os.getpid())) >= {process.pid, child}
    process.communicate(b"\n")


def test_urgent_end_does_not_wait():
    with adopting_orphans():
        before = set(children_of(os.getpid()))
        process = orphan(STUBBORN)
        end_children(exclude=before, timeout_s=600, is_urgent=lambda: True)
        assert process not in children_of(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
def test_a_child_is_asked_to_stop_when_its_parent_is_killed(tmp_path):
    says = tmp_path / "says"
    words = [sys.executable, "-c", PARENT_THAT_IS_KILLED, sys.executable, "-c", CHILD, str(says)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        int(parent.stdout.readline())
        wait_for(lambda: says.exists() and says.read_text() == "there")
        parent.kill()
    wait_for(lambda: says.read_text() == "SIGTERM")


def test_command_replaces_the_starting_process():
    program = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    begun = stopping_with_parent([sys.executable, "-c", program, "a b", "c=1"])
    with subprocess.Popen(begun, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == f"{process.pid} a b c=1\n"
    assert process.returncode == 7


def test_ctrl_c_is_heard_also_where_the_parent_ignores_it():
    """As for commands that a shell runs in the background."""
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begun = stopping_with_parent([sys.executable, "-c", program])
        assert subprocess.run(begun, capture_output=True, text=True, check=True).stdout == "True\n"
    finally:
        signal.signal(signal.SIGINT, before)


# A rank that takes its time before it listens, and says what it has heard by then.
SLOW_RANK = """
import sys, time
from tunebook.train.rank_process import StopRequest
print("there", flush=True)
sys.stdin.readline()
request = StopRequest()
with request.listening():
    print(request.name)
"""


def test_ctrl_c_waits_until_a_rank_listens(tmp_path):
    package = tmp_path / "tunebook"  # in the place of the rank's own program, whose libraries take seconds
    (package / "train").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(Path(tunebook.__file__).parent)!r})")
    (package / "train" / "__init__.py").write_text(f"__path__.append({str(Path(rank_process.__file__).parent)!r})")
    (package / "train" / "__main__.py").write_text(SLOW_RANK)
    begun = stopping_with_parent([sys.executable, "-m", "tunebook.train", "folder"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(begun, **pipes, text=True, env=environment) as process:
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate("go on\n", timeout=50) == ("SIGINT\n", "")
    assert process.returncode == 0


def test_it_starts_from_threads_while_torch_is_at_work():
    """A `preexec_fn` would crash here."""
    import torch

    codes = []

    def start():
        torch.ones(64, 64) @ torch.ones(64, 64)
        codes.append(subprocess.run(stopping_with_parent([sys.executable, "-c", ""]), check=False).returncode)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 8


def test_an_answer() -> None:
    answer = ask([*PYTHON, "import sys; print('42'); print('by the way', file=sys.stderr)"], timeout_s=30)
    assert (answer.text, answer.errors, answer.problem, answer.is_late) == ("42\n", "by the way\n", None, False)


def test_its_environment_is_the_one_that_is_given() -> None:
    code = "import os; print(os.environ.get('TOPIC'), os.environ.get('HOME'))"
    assert ask([*PYTHON, code], timeout_s=30, environment={"TOPIC": "links"}).text == "links None\n"


def test_a_program_that_is_not_there() -> None:
    answer = ask(["there-is-no-such-program"], timeout_s=5)
    assert answer.problem == "it cannot be started: No such file or directory"


def test_a_failure_has_its_last_words() -> None:
    code = "import sys; print('a table'); print('first\\nlast', file=sys.stderr); sys.exit(9)"
    answer = ask([*PYTHON, code], timeout_s=30)
    assert (answer.problem, answer.last_words, answer.text) == ("it ended with exit code 9", "last", "a table\n")


def test_one_that_crashes() -> None:
    answer = ask([*PYTHON, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], timeout_s=30)
    assert answer.problem == "it was killed by signal 11"
    assert answer.last_words == ""


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
