"""Run a launch command on this machine, pass stop requests on and wait; leave no process behind.

Ranks get the first request by a file in the run folder, on whichever machine they are. So torchrun does not get it: it
would give its ranks 30 seconds and then kill them, too short to save a large model. The second request kills them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tunebook.processes import (
    EarlyStart,
    adopting_orphans,
    children_of,
    end_children,
    handling_signals,
    kill_descendants,
    start,
)

_POLL_S = 0.2
_SAME_WITHIN_S = 2.0
_LOOK_EVERY_S = 5.0  # for ranks: it reads the state of every process


class StopRequests:
    """Counts the stop requests that this process receives; after the first one, only Ctrl-C two seconds later counts.

    Other signals arrive several times for one reason: both the shell and the kernel report a closed terminal. A second
    request means "do not save" and would lose the steps since the last checkpoint.
    """

    def __init__(self) -> None:
        self.first: str | None = None  # the name of the first request's signal
        self.num = 0
        self._last = 0.0

    @property
    def is_urgent(self) -> bool:
        """Whether a second request has come, after which nothing waits any more."""
        return self.num > 1

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Handle this process's signals (main thread only), and restore the handlers afterwards."""
        with handling_signals([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], self._note):
            yield self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.num and (number != signal.SIGINT or now - self._last < _SAME_WITHIN_S):
            return
        self.num += 1  # before any call, at which the next signal may interrupt this handler
        self._last = now
        if self.num == 1:
            self.first = signal.Signals(number).name


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
    output: Path | None = None,
    stop_timeout_s: float = 60,
    stop_file: Path | None = None,
    end_timeout_s: float = float("inf"),
    requests: StopRequests | None = None,
    early: EarlyStart | None = None,
) -> ProcessEnd:
    """Run a command until it ends. `log`, for its standard error, and the others are those of `start`.

    The first stop request is written to `stop_file`; without one, the command gets SIGTERM. `requests` are those of a
    caller that listens for longer. `early` may have started the command already. Processes that the command leaves
    behind get `stop_timeout_s` to save and end, and are then killed. torchrun is killed if it stays for `end_timeout_s`
    after its ranks have ended: it waits for a lost first node without a limit of its own.
    """
    with ExitStack() as stack:
        requests = requests or stack.enter_context(StopRequests().listening())
        stack.enter_context(adopting_orphans())
        before = children_of(os.getpid())
        limit_s = end_timeout_s if "torch.distributed.run" in command else float("inf")
        started = early.hand_over(command, environment, keep_open) if early is not None else None
        with started or start(command, environment, keep_open, errors=log, output=output) as process:
            exit_code = _wait_for(process, requests, stop_file, limit_s)
        end_children(exclude=before, timeout_s=stop_timeout_s, is_urgent=lambda: requests.is_urgent)
    return ProcessEnd(exit_code=exit_code, stopped_by=requests.first)


def _wait_for(
    process: subprocess.Popen[bytes], requests: StopRequests, stop_file: Path | None, end_timeout_s: float
) -> int:
    """Wait for the command, and pass requests on; return its exit code."""
    is_asked, ranks_seen_at, look_at = False, float("inf"), 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        if requests.first is not None and not is_asked:
            is_asked = True
            if stop_file is not None:
                stop_file.write_text(requests.first)
                print("stopping after this step, then saving; Ctrl-C again to quit unsaved", file=sys.stderr)
            else:
                process.terminate()
                print("stopping; Ctrl-C again to quit at once", file=sys.stderr)
        now = time.monotonic()
        if end_timeout_s < float("inf") and now > look_at:
            look_at = now + _LOOK_EVERY_S
            if children_of(process.pid):
                ranks_seen_at = now
        if requests.is_urgent or now - ranks_seen_at > end_timeout_s:
            kill_descendants(process.pid)
            process.kill()
