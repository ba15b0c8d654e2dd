"""How a rank's process ends: with the one that started it, and after an error of its own without the other ranks.

A process ends when the one that started it is gone, so that nobody trains on unseen after a `kill -9` (Linux). The
kernel minds the thread that started the process: it has to live as long as the process is wanted.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from tunebook.errors import InvalidTrainingError, StoppedError

# Exit codes of endings that the ranks take together, each by itself.
AGREED_ENDINGS = (0, StoppedError.exit_code, InvalidTrainingError.exit_code)

_SEEN_WITHIN_S = 2.0  # torchrun looks at its processes ten times a second
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# A program of its own that becomes the command, because a fork that goes on in Python (`preexec_fn`) crashed where
# torch was loaded and threads were at work. Its arguments: its parent, the signals to be ignored, "waits" where SIGINT
# is to wait until the command listens, the command.
_PROGRAM = f"""
import signal, sys
if sys.argv[3] == "waits":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
import ctypes, os
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGINT, signal.SIG_DFL)
for number in sys.argv[2].split(","):
    if number:
        signal.signal(int(number), signal.SIG_IGN)
os.execvp(sys.argv[4], sys.argv[4:])
"""
# A rank that is started without torchrun: it listens after some imports, where Ctrl-C would end it with a traceback.
_RANK = ["-m", "tunebook.train"]


def prctl(option: int, value: int) -> None:
    """Ask the kernel for something about this process; nothing where there is no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class RankEnd:
    """How a rank's process ends. To be made before the libraries are imported: what they do at an end comes first then.

    Python's taking apart of its objects never comes. What DeepSpeed holds keeps gloo's threads past
    `destroy_process_group`, and one that lets go of a tensor while Python is taken apart aborts the process
    (pytorch#190489): a run that was over and saved would have failed.
    """

    def __init__(self) -> None:
        self._exit_code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self._exit_code is not None:
            _end_at_once(self._exit_code)

    def leave(self, exit_code: int) -> NoReturn:
        """End this process; where it failed alone at once, and without what libraries do at an end.

        NCCL's part of that waits until all ranks have come to it: a rank out of GPU memory stayed for minutes, with its
        GPU and the other ranks waiting in a collective, until somebody stopped the run (2 H200, FSDP). It stays a
        moment all the same: where it failed because another was killed, torchrun has to see that one's end first.
        """
        if exit_code in AGREED_ENDINGS:
            self._exit_code = exit_code
            sys.exit(exit_code)
        _flush()  # torchrun may kill it while it stays
        if os.environ.get("WORLD_SIZE", "1") != "1":
            time.sleep(_SEEN_WITHIN_S)
        _end_at_once(exit_code)


def _end_at_once(exit_code: int) -> NoReturn:
    _flush()
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it may be gone, which is no failure of the run
            stream.flush()


def ask_to_stop_when_parent_dies() -> None:
    """Let the kernel send this process SIGTERM, on which a rank saves and ends, when its parent dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stopping_with_parent(command: list[str], ignoring: tuple[signal.Signals, ...] = ()) -> list[str]:
    """The command, to be started by this process: it is sent SIGTERM when this process dies, once or several times.

    Several times, since the kernel minds the thread that started it and then, one by one, those that outlive that one.
    SIGINT is heard even where this process ignores it, being in the background. Signals in `ignoring` are ignored from
    the start. SIGINT waits for a rank until `StopRequest` listens; nothing else listens that way, and would be deaf.
    Exit code 1, with a traceback, where the command does not exist.
    """
    ignored = ",".join(str(int(number)) for number in ignoring)
    when = "waits" if command[1:3] == _RANK else "at once"
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), ignored, when, *command]
