"""Processes that end with the one that started them, so that nobody computes on unseen after a `kill -9` (Linux).

The kernel minds the thread that started a process: it has to live as long as the process is wanted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

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
