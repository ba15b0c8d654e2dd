"""Run a launch command on this machine, forward stop requests and wait; leave no process behind.

The command gets its own process group. So Ctrl-C in a terminal reaches it only through this process, once and at the
right process. Stop requests bypass torchrun, which would give its ranks 30 seconds and then kill them: too short to
save a large model. Ranks on other machines, started by srun or Ray, get the first request by a file in the run folder.
If a launcher dies, the kernel asks its processes to stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tunebook.processes import (
    RequestCount,
    adopting_orphans,
    children_of,
    end_children,
    handling_signals,
    stopping_with_parent,
)

TORCHRUN = "torch.distributed.run"
# Signals forwarded for the first request (finish the step and save). The second request sends SIGINT: ranks end without
# saving, or are killed if they cannot. Further requests send SIGKILL. After the first request only Ctrl-C counts.
_FIRST = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM}
POLL_S = 0.2
_LOOK_EVERY_S = 5.0  # for ranks: it reads the state of every process
_SECOND_WITHIN_S = 2.0  # to end after a second request: a rank inside library code never sees it


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed, as reported by torchrun."""

    rank: int
    exit_code: int  # negative: killed by that signal
    host: str

    @property
    def is_by_signal(self) -> bool:
        """Whether an outside signal killed it. SIGTERM does not count: it ends ranks after another rank's failure."""
        return self.exit_code < 0 and self.exit_code != -signal.SIGTERM

    @property
    def where(self) -> str:
        """The rank and its host."""
        return f"rank {self.rank} on {self.host}"

    @property
    def how(self) -> str:
        """The failure as text."""
        if self.exit_code >= 0:
            return f"it ended with exit code {self.exit_code}"
        number = -self.exit_code
        names = {each.value: each.name for each in signal.Signals}
        hint = " (the system's usual way when memory runs out)" if number == signal.SIGKILL else ""
        return f"it was killed by {names.get(number, f'signal {number}')}{hint}"


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a command ended."""

    exit_code: int  # negative: killed by that signal
    stopped_by: str | None  # the first stop request received while it ran


def run_and_wait(
    command: list[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
    *,
    log: Path | None = None,
    stop_timeout_s: float = 60,
    stop_file: Path | None = None,
    end_timeout_s: float = float("inf"),
) -> ProcessEnd:
    """Run a command until it ends. The file descriptors `keep_open` stay open in it; `log` receives its standard error.

    With `stop_file`, the first stop request is written there, and the command itself gets the second one. Processes
    that the command leaves behind get `stop_timeout_s` to save and end, and are then killed. torchrun is killed if it
    stays for `end_timeout_s` after its ranks have ended: it waits for a lost first node without a limit of its own.
    """
    started: Started | None = None
    early: list[signal.Signals] = []  # requests that came before the command ran

    def hand_on(number: signal.Signals) -> None:
        if stop_file is not None and not requests.is_urgent:
            stop_file.write_text(str(requests.first))
        elif started is None:
            early.append(number)
        else:
            started.send(number)

    requests = StopRequests(hand_on)
    with requests.listening(), adopting_orphans():
        before = set(children_of(os.getpid()))
        started = start_command(command, environment, keep_open, log=log)
        for number in early:
            started.send(number)
        exit_code = _wait_for(started, requests, end_timeout_s)
        end_children(exclude=before, timeout_s=stop_timeout_s, is_urgent=lambda: requests.is_urgent)
    return ProcessEnd(exit_code=exit_code, stopped_by=requests.first)


def _wait_for(started: Started, requests: StopRequests, end_timeout_s: float) -> int:
    """Wait for the command, and kill it some time after a second stop request; return its exit code."""
    ranks_seen_at, look_at = float("inf"), 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return started.process.wait(POLL_S)
        now = time.monotonic()
        if started.is_torchrun and now > look_at:
            look_at = now + _LOOK_EVERY_S
            if children_of(started.process.pid):
                ranks_seen_at = now
        if requests.overdue_s > 0 or now - ranks_seen_at > end_timeout_s:
            started.kill()


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running command: torchrun with its ranks, or one process."""

    process: subprocess.Popen[bytes]
    is_torchrun: bool

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the training processes, but not to torchrun itself."""
        ranks = children_of(self.process.pid) if self.is_torchrun else []
        for process in ranks or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """Kill the ranks and the process that started them."""
        self.send(signal.SIGKILL)
        self.process.kill()


def start_command(
    command: list[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
    *,
    log: Path | None = None,
    output: Path | None = None,
    working_folder: Path | None = None,
) -> Started:
    """Start a command in its own process group; the kernel asks it to stop if this process dies.

    `log` receives its standard error, `output` all that it prints; without them both are this process's own.
    """
    file = output or log
    stream = None if file is None else file.open("ab")
    try:
        process = subprocess.Popen(
            stopping_with_parent(command),
            env=environment,
            cwd=working_folder,
            stdin=subprocess.PIPE if command[0] == "srun" else None,  # open as long as this process lives
            stdout=None if output is None else stream,
            stderr=stream,
            process_group=0,
            pass_fds=tuple(keep_open),
        )
    finally:
        if stream is not None:
            stream.close()
    return Started(process=process, is_torchrun=TORCHRUN in command)


class StopRequests:
    """Counts the stop requests that this process receives, and forwards each as the signal for the ranks."""

    def __init__(self, hand_on: Callable[[signal.Signals], None]) -> None:
        self.first: str | None = None
        self._hand_on = hand_on
        self._count = RequestCount()
        self._second_at: float | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether a second request has come, after which nothing waits any more."""
        return self._second_at is not None

    @property
    def overdue_s(self) -> float:
        """Seconds since the deadline for ending after a second request; 0 before the deadline."""
        if self._second_at is None:
            return 0.0
        return max(0.0, time.monotonic() - self._second_at - _SECOND_WITHIN_S)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle this process's signals (main thread only), and restore the handlers afterwards."""
        with handling_signals([signal.SIGINT, *_FIRST], self._note):
            yield

    def _note(self, number: int, _frame: FrameType | None) -> None:
        turn = self._count.take(number)
        if turn == 0:
            return
        self.first = self.first or signal.Signals(number).name
        is_first, is_second = turn == 1, turn == 2
        if is_second:
            self._second_at = time.monotonic()
        sent = _FIRST.get(signal.Signals(number), signal.SIGINT) if is_first else signal.SIGINT
        self._hand_on(sent if is_first or is_second else signal.SIGKILL)
