"""Processes above and below this one (Linux), so that nothing computes on unseen after a `kill -9`.

A process can be stopped or killed when its parent dies: the kernel watches the thread that started it, which has to
live as long as the process is wanted. And this process can adopt those below it whose own parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_S = 0.1
_DEAD_WITHIN_S = 20.0  # after a kill: letting go of a large memory takes seconds

# A program of its own that becomes the command, because a fork that goes on in Python (`preexec_fn`) crashed where
# torch was loaded and threads were at work. Its arguments: its parent, "waits" where SIGINT is to wait until the
# command listens, the command.
_PROGRAM = f"""
import signal, sys
if sys.argv[2] == "waits":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
import ctypes, os
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[3], sys.argv[3:])
"""
# A rank that is started without torchrun: it listens after some imports, where Ctrl-C would end it with a traceback.
_RANK = ["-m", "tunebook.train"]


def prctl(option: int, value: int) -> None:
    """Ask the kernel for something about this process; nothing where there is no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def ask_to_stop_when_parent_dies() -> None:
    """Let the kernel send this process SIGTERM, on which a rank saves and ends, when its parent dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stopping_with_parent(command: list[str]) -> list[str]:
    """The command, to be started by this process: it is sent SIGTERM when this process dies, once or several times.

    Several times, since the kernel minds the thread that started it and then, one by one, those that outlive that one.
    SIGINT is heard even where this process ignores it, being in the background. It waits for a rank until `StopRequest`
    listens; nothing else listens that way, and would be deaf.
    Exit code 1, with a traceback, where the command does not exist.
    """
    when = "waits" if command[1:3] == _RANK else "at once"
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), when, *command]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of every process below this one whose own parent dies, instead of the system's first process.

    torchrun starts ranks in sessions of their own: after a `kill -9` of it nobody else would know them.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children_of(process: int) -> list[int]:
    """The processes that a process started, or adopted, and that still run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it ended meanwhile
            # The name of the program, in brackets, may itself hold brackets and blanks: state and parent follow it.
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == process and state != "Z":
                found.append(int(status.parent.name))
    return found


def descendants_of(process: int) -> list[int]:
    """The processes below a process that still run, those that it started itself first."""
    found = children_of(process)
    for child in found:  # grows meanwhile
        found += children_of(child)
    return found


def end_children(
    *, exclude: Collection[int] = (), timeout_s: float = 0, is_urgent: Callable[[], bool] = lambda: False
) -> None:
    """Wait for adopted children to end, each asked once by SIGTERM; after `timeout_s`, or once it is urgent, killed.

    `exclude` are the children that this process has for other reasons. One that a kill does not end, since it waits in
    the kernel for a disk or a driver, is left after some seconds.
    """
    asked: set[int] = set()
    end = time.monotonic() + timeout_s
    killed_at: float | None = None
    while left := _reap(exclude):
        is_late = time.monotonic() >= end or is_urgent()
        if is_late:
            killed_at = killed_at or time.monotonic()
            if time.monotonic() - killed_at > _DEAD_WITHIN_S:
                return
        for process in left:
            if is_late or process not in asked:
                asked.add(process)
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if is_late else signal.SIGTERM)
        time.sleep(_POLL_S)


def _reap(exclude: Collection[int]) -> list[int]:
    """Take leave of adopted children that have ended; returns those still at work."""
    own = os.getpid()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            process = int(status.parent.name)
            if int(parent) == own and state == "Z" and process not in exclude:
                os.waitpid(process, os.WNOHANG)
    return [process for process in children_of(own) if process not in exclude]
