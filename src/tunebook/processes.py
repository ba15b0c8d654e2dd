"""Processes: start one, find and end its descendants, and run a program that may hang.

None may continue unnoticed after a `kill -9` of its parent. So the standard input of a started process is a pipe that
ends with the parent (`stop_when_input_ends`), and this process can adopt its descendants whose parent dies.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, cast

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ENDS_WITH_INPUT = "TUNEBOOK_ENDS_WITH_INPUT"  # variable
_POLL_S = 0.1
_DEAD_WITHIN_S = 20.0  # after a kill: letting go of a large memory takes seconds
_LONGEST_ANSWER = 1 << 20  # bytes
_LONGEST_ARGUMENT = 1 << 16  # bytes; a path has at most 4,096
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


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
    *,
    errors: Path | None = None,
    output: Path | None = None,
    working_folder: Path | None = None,
    source: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in its own process group, so that Ctrl-C in a terminal reaches it only through this process.

    `errors` receives its standard error, `output` all that it prints; without them both are this process's own. Its
    standard input is the descriptor `source`, or a new pipe. The file descriptors `keep_open` stay open in it.
    """
    with ExitStack() as stack:
        file = output or errors
        stream = None if file is None else stack.enter_context(file.open("ab"))
        return subprocess.Popen(
            command,
            env={**environment, ENDS_WITH_INPUT: "1"},
            cwd=working_folder,
            stdin=subprocess.PIPE if source is None else source,
            stdout=None if output is None else stream,
            stderr=stream,
            process_group=0,
            pass_fds=tuple(keep_open),
        )


def stop_when_input_ends() -> None:
    """Get SIGTERM, on which a rank saves and ends, when standard input ends: the process that started this is gone.

    torchrun, srun and Docker's client pass their input on. Only if the environment asks for it.
    """
    if os.environ.get(ENDS_WITH_INPUT):

        def wait() -> None:
            while os.read(0, 4096):
                pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, daemon=True, name="input").start()


class EarlyStart:
    """Starts a program before its last argument is known, so that it can import libraries meanwhile.

    The program gets the argument from `last_argument`. It is killed if it was not handed over at the end of a `with`.
    """

    def __init__(self) -> None:
        self._command: list[str] = []
        self._environment: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EarlyStart:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start a command without its last argument."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start(command, environment, source=theirs.fileno())
        self._process.stdin = cast(IO[bytes], ours)  # closed where the pipe of other processes would be
        self._command, self._environment = command, environment

    def hand_over(
        self, command: list[str], environment: Mapping[str, str], keep_open: Sequence[int] = ()
    ) -> subprocess.Popen[bytes] | None:
        """The started process, which now gets its last argument and the open files; None if it is not this command."""
        process = self._process
        if process is None:
            return None
        # Libraries that this process has imported meanwhile may have set more variables.
        if command[:-1] != self._command or not self._environment.items() <= environment.items():
            self.cancel()
            return None
        try:
            socket.send_fds(cast(socket.socket, process.stdin), [os.fsencode(command[-1])], list(keep_open))
        except OSError:  # it has ended; the command says why when it is started again
            self.cancel()
            return None
        self._process = None
        return process

    def cancel(self) -> None:
        """Kill the process if it has not been handed over."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes its input and waits
                self._process = None


def last_argument() -> str | None:
    """Wait for the argument from `EarlyStart`; the files that come with it stay open. None if the starter has ended."""
    with socket.socket(fileno=os.dup(0)) as starter:
        argument, _files, _flags, _address = socket.recv_fds(starter, _LONGEST_ARGUMENT, maxfds=8)
    return os.fsdecode(argument) or None


def _prctl(option: int, value: int) -> None:
    """Set an option of this process in the kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent() -> None:
    """Be killed when the parent dies (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of every descendant whose own parent dies, instead of the init process (Linux only).

    torchrun starts ranks in their own sessions: after a `kill -9` of torchrun no other process would know them.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children_of(process: int) -> list[int]:
    """The running children of a process, adopted ones included (Linux only)."""
    return [child for child, state in _children(process) if state != "Z"]


def _children(process: int) -> Iterator[tuple[int, str]]:
    """Each child of a process with its state; `Z` is a child that has ended and was not waited for."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended in the meantime
            # The program's name is in parentheses and may contain parentheses and blanks. State and parent follow it.
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == process:
                yield int(status.parent.name), state


def kill_descendants(process: int) -> None:
    """Kill all descendants of a process."""
    descendants = children_of(process)
    for child in descendants:  # the list grows in the loop
        descendants += children_of(child)
    for child in descendants:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def end_children(
    *, exclude: Collection[int] = (), timeout_s: float = 0, is_urgent: Callable[[], bool] = lambda: False
) -> None:
    """Send adopted children SIGTERM once and wait for them; kill them after `timeout_s`, or when it is urgent.

    `exclude` are other children of this process. A child that a kill does not end, since it waits in the kernel for a
    disk or a driver, is left after some seconds.
    """
    terminated: set[int] = set()
    end = time.monotonic() + timeout_s
    while (left := set(children_of(os.getpid())) - set(exclude)) and time.monotonic() < end + _DEAD_WITHIN_S:
        if is_urgent():
            end = min(end, time.monotonic())
        is_late = time.monotonic() >= end
        for process in left if is_late else left - terminated:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if is_late else signal.SIGTERM)
        terminated |= left
        time.sleep(_POLL_S)
    for process, _ in _children(os.getpid()):
        if process not in exclude:
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


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
