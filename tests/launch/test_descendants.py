"""Processes that lose their parent are adopted, asked to end, and killed when they do not."""

import os
import subprocess
import sys
import time

from tunebook.launch.descendants import adopting_orphans, children_of, end_children

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


def test_children_for_other_reasons_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    end_children(exclude={*children_of(os.getpid())}, timeout_s=0)
    assert other.poll() is None
    other.communicate(b"\n")
