"""One trial: a child process `tunebook train` in its own run folder. Its end is a return value, never an exception.

The child gets its own process group, so that Ctrl-C does not reach it twice: this process asks it once, and it can save
and end cleanly. The first request is SIGTERM. If the sweep is killed, the kernel sends SIGTERM too, and more than once
if the sweep has several threads. So a second request is SIGINT.
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

from tunebook.config.override_text import command_words
from tunebook.errors import InvalidTrainingError, StoppedError
from tunebook.files import atomic_write_json, read_json
from tunebook.processes import stopping_with_parent
from tunebook.record.run_folder import LOCK_FILE, is_worked_in
from tunebook.train.rank_process import RequestCount, handling_signals

EXIT_STOPPED = StoppedError.exit_code
_WATCH_EVERY_S = 1.0
_FREE_WITHIN_S = 600.0  # a killed trial's processes may save a large model first
_POLL_S = 0.2

Watch = Callable[[], str | None]  # returns why a running trial should be ended early, or None


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """How the process of a trial ended."""

    exit_code: int
    seconds: float  # of all its turns, if it was stopped and resumed
    was_interrupted: bool  # the sweep was stopped while it ran
    was_pruned: bool = False  # the search ended it early
    reason: str | None = None  # if the sweep knows it: the run's own records may lack it

    @property
    def is_done(self) -> bool:
        """Whether the same command does not run the trial again: it finished, was invalid or was pruned."""
        return self.was_pruned or self.exit_code in (0, InvalidTrainingError.exit_code)

    @property
    def is_final(self) -> bool:
        """Whether the trial would not resume in another turn of its Slurm job."""
        return self.was_pruned or self.exit_code not in (1, EXIT_STOPPED)

    @property
    def text(self) -> str:
        """Exit code and duration."""
        return f"ended with exit code {self.exit_code} after {self.seconds:.0f} s"

    def after(self, earlier_s: float) -> TrialEnd:
        """Return this end with the seconds of earlier turns added."""
        return replace(self, seconds=round(earlier_s + self.seconds, 1))


def train_command(recipe: str | None, overrides: Collection[str], run_folder: Path, dirs: list[Path]) -> list[str]:
    """Return the argument list that trains one trial."""
    words = command_words("train", recipe, overrides, dirs)
    return [sys.executable, "-m", *words, "--run-folder", str(run_folder)]


def run_trial(
    command: list[str],
    stopping: Stopping,
    *,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
    watch: Watch | None = None,
) -> TrialEnd:
    """Run a trial until it ends. `output` is the file that its output is appended to; None: the terminal.

    It runs on `cores`, if any are given. If `watch` returns a reason, the trial is asked to stop, once.
    """
    started = time.monotonic()
    stream = None if output is None else output.open("ab")
    try:
        begin = stopping_with_parent(command)
        process = subprocess.Popen(begin, stdout=stream, stderr=stream, env=environment, start_new_session=True)
        if cores and hasattr(os, "sched_setaffinity"):  # while it has one thread: later threads inherit this
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
    """Ask a trial to save and stop, then to stop at once, then kill it; the kernel asks its children to stop."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        if num_requests <= 2:
            os.kill(process.pid, signal.SIGTERM if num_requests == 1 else signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], watch: Watch | None) -> str | None:
    """Wait until the process ends; return why it was pruned, or None."""
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
    """Wait for processes that a killed trial left in its folder, which save and end; return whether they have ended.

    Until then its GPUs are not free, and nothing can resume in the folder.
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
    """Return how a trial ended; None if it has not ended or never started."""
    return TrialEnd(**read_json(end_file)) if end_file.is_file() else None


def begin_trial(end_file: Path) -> float:
    """Remove the record of how an earlier attempt ended; return the seconds of all attempts so far."""
    end = read_trial_end(end_file)
    end_file.unlink(missing_ok=True)
    return 0.0 if end is None else end.seconds


_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Ask = Callable[[int], None]  # gets the number of stop requests of a trial so far, from 1


class Stopping:
    """Whether the sweep was asked to stop, and how often."""

    def __init__(self) -> None:
        self._count = RequestCount()
        self._asked: dict[int, Ask] = {}  # single operations only: a signal handler must not wait for a lock

    @property
    def num_requests(self) -> int:
        """The number of requests so far."""
        return self._count.num

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle this process's signals (main thread only), and restore the handlers afterwards."""
        with handling_signals(_REQUESTS, self._note):
            yield

    @contextmanager
    def asking(self, ask: Ask) -> Iterator[None]:
        """Forward requests to a trial while it runs, including earlier ones."""
        self._asked[id(ask)] = ask
        try:
            if self.num_requests:
                ask(self.num_requests)
            yield
        finally:
            del self._asked[id(ask)]

    def request(self) -> None:
        """Ask every running trial to stop, once more."""
        self._ask(self._count.take(signal.SIGINT))

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if turn := self._count.take(number):
            self._ask(turn)

    def _ask(self, turn: int) -> None:
        for ask in list(self._asked.values()):
            ask(turn)
