"""Parent and child processes (Linux): none must continue unnoticed after a `kill -9`. Also programs that may hang.

The kernel can stop or kill a process when its parent dies; it watches the thread that started the process, which must
live as long. This process can also adopt its descendants whose parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ENDS_WITH_INPUT = "TUNEBOOK_ENDS_WITH_INPUT"  # variable
_POLL_S = 0.1
_DEAD_WITHIN_S = 20.0  # after a kill: letting go of a large memory takes seconds

# A separate program that becomes the command, since a fork that continues in Python (`preexec_fn`) crashed with torch
# and threads. Its arguments: the parent, "waits" if SIGINT is blocked until the command handles it, the command.
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
# A rank without torchrun handles signals only after some imports, in which Ctrl-C would end it with a traceback.
_RANK = ["-m", "tunebook.train"]
_LONGEST_ANSWER = 1 << 20  # bytes
_DYING_S = 2.0  # how long a killed program is given to go, so that it leaves no zombie


@contextmanager
def handling_signals(
    numbers: Collection[int], handler: Callable[[int, FrameType | None], None], *, takes_ignored: bool = False
) -> Iterator[None]:
    """Handle signals of this process (main thread only), and restore the earlier handlers.

    Ignored signals stay ignored unless `takes_ignored`: nohup ignores the end of the terminal, a shell ignores Ctrl-C
    for background jobs.
    """
    taken = [number for number in numbers if takes_ignored or signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class RequestCount:
    """Counts requests to stop. Only Ctrl-C counts a second time.

    Other signals arrive several times for one reason: the kernel reports the death of each of the parent's threads, and
    both the shell and the kernel report a closed terminal. A second request means "do not save" and would lose the
    steps since the last checkpoint.
    """

    def __init__(self) -> None:
        self.num = 0

    def take(self, number: int) -> int:
        """The number of this request, from 1; 0 if it was counted before.

        Calls no function: the next signal may interrupt a handler at a call.
        """
        if self.num and number != signal.SIGINT:
            return 0
        self.num += 1
        return self.num


def own_cores() -> list[int]:
    """The cores that this process may use; a scheduler may have assigned it only some of the machine's."""
    if hasattr(os, "sched_getaffinity"):  # honours taskset and cpusets; Linux only
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def prctl(option: int, value: int) -> None:
    """Set an option of this process in the kernel (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def ask_to_stop_when_parent_dies() -> None:
    """Get SIGTERM, on which a rank saves and ends, when the parent dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def die_with_parent() -> None:
    """Be killed when the parent dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_when_input_ends() -> None:
    """Get SIGTERM when standard input ends, if the environment asks for it.

    Docker closes the input of a container whose client was killed, as the clients of a killed job are; nothing else
    would end it.
    """
    if os.environ.get(ENDS_WITH_INPUT):

        def wait() -> None:
            while os.read(0, 4096):
                pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, daemon=True, name="input").start()


def stopping_with_parent(command: list[str]) -> list[str]:
    """A command that gets SIGTERM when this process, which starts it, dies.

    It may get SIGTERM several times, since the kernel watches the thread that started it and then the remaining ones.
    SIGINT has its default action even if this process ignores it in the background. For a rank it is blocked until
    `StopRequest` listens; other commands never unblock it. Exit code 1, with a traceback, if the command does not
    exist.
    """
    when = "waits" if command[1:3] == _RANK else "at once"
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), when, *command]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of every descendant whose own parent dies, instead of the init process.

    torchrun starts ranks in their own sessions: after a `kill -9` of torchrun no other process would know them.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children_of(process: int) -> list[int]:
    """The running children of a process, adopted ones included."""
    return [child for child, state in _children(process) if state != "Z"]


def _children(process: int) -> Iterator[tuple[int, str]]:
    """Pid and state of every child of a process; `Z` is a child that has ended and was not waited for.

    A process whose main thread has ended has that state, too, while others of its threads run: it is reported as `R`.
    """
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it ended in the meantime
            # The program's name is in parentheses and may contain parentheses and blanks. State and parent follow it.
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == process:
                has_threads = state == "Z" and len([*(status.parent / "task").iterdir()]) > 1
                yield int(status.parent.name), "R" if has_threads else state


def descendants_of(process: int) -> list[int]:
    """The running descendants of a process, its children first."""
    found = children_of(process)
    for child in found:  # the list grows in the loop
        found += children_of(child)
    return found


def end_children(
    *, exclude: Collection[int] = (), timeout_s: float = 0, is_urgent: Callable[[], bool] = lambda: False
) -> None:
    """Send adopted children SIGTERM once and wait for them; kill them after `timeout_s`, or when it is urgent.

    `exclude` are other children of this process. A child that a kill does not end, since it waits in the kernel for a
    disk or a driver, is left after some seconds.
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
    """Collect adopted children that have ended; returns the running ones."""
    running = []
    for child, state in _children(os.getpid()):
        if child in exclude:
            continue
        if state != "Z":
            running.append(child)
            continue
        with suppress(OSError):
            os.waitpid(child, os.WNOHANG)
    return running


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a program, and why it is not an answer, if it failed."""

    text: str
    errors: str = ""
    problem: str | None = None  # such as: no answer within 20 s
    is_late: bool = False  # it exceeded the time limit

    @property
    def last_words(self) -> str:
        """The last line of its errors or else its output: most often the reason of a failure."""
        lines = [line.strip() for line in (self.errors.strip() or self.text.strip()).splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    @property
    def failure(self) -> str | None:
        """The problem and the last line of the output; None without a problem."""
        return f"{self.problem}: {self.last_words}" if self.problem and self.last_words else self.problem


def ask(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run a program with a time limit. Never raises for what the program does.

    A GPU that fell off the bus leaves `nvidia-smi` in a state in which not even SIGKILL ends it. So the output goes to
    files, which need no reader, and a killed program is not waited for.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=dict(environment) if environment is not None else None,
                start_new_session=True,
            )
        except OSError as error:
            return Answer(text="", problem=f"it cannot be started: {error.strerror or error}")
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            problem = f"no answer within {timeout_s:g} s"
            return Answer(text=_read(output), errors=_read(errors), problem=problem, is_late=True)
        except BaseException:  # Ctrl-C
            _kill(process)
            raise
        return Answer(text=_read(output), errors=_read(errors), problem=None if code == 0 else f"it {ending(code)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DYING_S)


def _read(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(_LONGEST_ANSWER).decode(errors="replace")


def ending(code: int) -> str:
    """How a process ended, by its exit code: negative for a signal."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
