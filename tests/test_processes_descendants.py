"""Processes that lose their parent are adopted, asked to end, and killed when they do not."""

import os
import subprocess
import sys
import time

from tunebook.processes import adopting_orphans, children_of, descendants_of, end_children

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


def test_all_that_is_below_a_process_is_found():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    (child,) = children_of(process.pid)
    assert descendants_of(process.pid) == [child]
    assert set(descendants_of(os.getpid())) >= {process.pid, child}
    process.communicate(b"\n")


def test_what_has_become_urgent_is_not_waited_for():
    with adopting_orphans():
        before = set(children_of(os.getpid()))
        process = orphan(STUBBORN)
        end_children(exclude=before, timeout_s=600, is_urgent=lambda: True)
        assert process not in children_of(os.getpid())
