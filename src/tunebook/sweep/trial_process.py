"""One trial: a child process `tunebook train` in its own run folder, whose end is a value and never an exception.

The child gets a process group of its own, so that Ctrl-C does not reach it twice: it is asked to stop once, from here,
and can save and end cleanly. It is asked by SIGTERM. Should the sweep be killed, the kernel asks it in the same way,
more than once where the sweep has several threads, so a second request is a SIGINT.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from tunebook.files import atomic_write_json, read_json
from tunebook.processes import stopping_with_parent
from tunebook.record.run_folder import LOCK_FILE, is_worked_in
from tunebook.train.rank_process import RequestCount, handling_signals

EXIT_STOPPED = 6  # a run that was asked to stop
_WATCH_EVERY_S = 1.0
_FREE_WITHIN_S = 600.0  # what a killed trial leaves behind saves a large model first
_POLL_S = 0.2

Watch = Callable[[], str | None]  # why a running trial is not worth going on with, if it is not


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """How the process of a trial ended."""

    exit_code: int
    seconds: float  # of all its turns, where it was stopped and went on
    was_interrupted: bool  # the sweep was stopped while it ran
    was_pruned: bool = False  # the search ended it early
    reason: str | None = None  # where the sweep knows it: the run's own records may not

    def after(self, earlier_s: float) -> TrialEnd:
        """The same of a trial that went on, where the turns before took so long."""
        return replace(self, seconds=round(earlier_s + self.seconds, 1))


def train_command(recipe: str | None, overrides: Collection[str], run_folder: Path, dirs: list[Path]) -> list[str]:
    """The argument list that trains one trial."""
    command = [sys.executable, "-m", "tunebook", "train", *([recipe] if recipe else []), *overrides]
    for folder in dirs:
        command += ["--recipes-dir", str(folder)]
    return [*command, "--run-folder", str(run_folder)]


def run_trial(
    command: list[str],
    stopping: Stopping,
    *,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
    watch: Watch | None = None,
) -> TrialEnd:
    """Run a trial to its end. `output` takes what it prints (added at the end); None leaves it on the terminal.

    It runs on `cores`, if any are named. Where `watch` finds a reason it is asked to stop, once.
    """
    started = time.monotonic()
    stream = None if output is None else output.open("ab")
    try:
        begin = stopping_with_parent(command)
        process = subprocess.Popen(begin, stdout=stream, stderr=stream, env=environment, start_new_session=True)
        if cores and hasattr(os, "sched_setaffinity"):  # while it is still one thread: all that follow inherit it
            with suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, cores)
        with stopping.asking(lambda num_requests: ask_to_stop(process, num_requests)):
            pruned = _wait(process, watch)
    finally:
        if stream is not None:
            stream.close()
    exit_code = max(process.returncode, 1) if process.returncode else 0
    how = f"its process was killed by signal {-process.returncode}" if process.returncode < 0 else None
    return TrialEnd(
        exit_code=exit_code,
        seconds=round(time.monotonic() - started, 1),
        was_interrupted=stopping.num_requests > 0 and exit_code != 0,
        was_pruned=pruned is not None and exit_code == EXIT_STOPPED,
        reason=pruned or how,
    )


def ask_to_stop(process: subprocess.Popen[bytes], num_requests: int) -> None:
    """Save and stop, then stop at once; after that, end it by force: what it started is asked by the kernel."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        if num_requests <= 2:
            os.kill(process.pid, signal.SIGTERM if num_requests == 1 else signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], watch: Watch | None) -> str | None:
    """Wait for the end; the reason for which it was pruned, if it was."""
    reason: str | None = None
    while True:
        try:
            process.wait(_WATCH_EVERY_S)
            return reason
        except subprocess.TimeoutExpired:
            if watch is not None and reason is None:
                reason = watch()
                if reason is not None:
                    ask_to_stop(process, 1)


def wait_until_free(run_folder: Path, say: Callable[[], None] = lambda: None) -> bool:
    """Wait for what a killed trial left at work in its folder, which saves and ends; whether it has ended.

    Until then its GPUs are not free, and nothing can go on in the folder.
    """
    end = time.monotonic() + _FREE_WITHIN_S
    has_said = False
    while (run_folder / LOCK_FILE).is_file() and is_worked_in(run_folder):
        if time.monotonic() > end:
            return False
        if not has_said:
            say()
            has_said = True
        time.sleep(_POLL_S)
    return True


def write_trial_end(end: TrialEnd, end_file: Path) -> None:
    """Record how a trial ended."""
    atomic_write_json(end_file, asdict(end))


def read_trial_end(end_file: Path) -> TrialEnd | None:
    """How a trial ended; None when it never did, or was never started."""
    return TrialEnd(**read_json(end_file)) if end_file.is_file() else None


_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Ask = Callable[[int], None]  # how often a trial has been asked by now, from 1


class Stopping:
    """Whether the sweep was asked to stop, and how often."""

    def __init__(self) -> None:
        self._count = RequestCount()
        self._asked: dict[int, Ask] = {}  # single operations only: a signal's handler must not wait for a lock

    @property
    def num_requests(self) -> int:
        """How often, by now."""
        return self._count.num

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals of this process (main thread only), and give them back."""
        with handling_signals(_REQUESTS, self._note):
            yield

    @contextmanager
    def asking(self, ask: Ask) -> Iterator[None]:
        """Hand requests on to a trial while it runs, also one that has come in already."""
        self._asked[id(ask)] = ask
        try:
            if self.num_requests:
                ask(self.num_requests)
            yield
        finally:
            del self._asked[id(ask)]

    def request(self) -> None:
        """Ask every trial that runs to stop, once more."""
        self._ask(self._count.take(signal.SIGINT))

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if turn := self._count.take(number):
            self._ask(turn)

    def _ask(self, turn: int) -> None:
        for ask in list(self._asked.values()):
            ask(turn)
