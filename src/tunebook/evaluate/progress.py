"""Progress of an evaluation: the task and its answered requests, as a rich bar on a terminal, else as plain lines.

Without a terminal, each finished task prints a line. A long task prints lines in between, first every few seconds and
later less often, so that an overnight log does not hold thousands.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 5.0
_SHARE_BETWEEN_LINES = 0.05  # of the time since the start: 60 lines for the first 100 s, and 14 each time it doubles


class AnswerProgress:
    """Counts answered requests; a context manager around one evaluation."""

    def __init__(self, label: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._console = console or Console(file=sys.stderr)
        self._clock = clock
        self._started = self._last_line = clock()
        self._task = ""
        self._num_done = self._num_expected = 0
        self.others: Any = None  # shared count of the requests that helper processes answered
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar_task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin_task(self, name: str, number: int, num_tasks: int) -> None:
        """Start a task; its requests are counted from zero."""
        self._task = name if num_tasks == 1 else f"{name} (task {number} of {num_tasks})"
        self._num_done = self._num_expected = 0
        if self.others is not None:
            self.others.value = 0
        self._last_line = self._clock()
        if self._bar is not None:
            self._bar.reset(self._bar_task, total=None, description=f"{self._label}: {self._task}")

    def end_task(self, how: str) -> None:
        """Print the outcome of the task."""
        self.say(f"{self._task}: {how}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._last_line = self._clock()
        self._console.print(f"{self._label}: {text}", highlight=False, markup=False, soft_wrap=True)

    def expect(self, num_requests: int) -> None:
        """Add to the number of expected requests."""
        self._num_expected += num_requests
        if self._bar is not None:
            self._bar.update(self._bar_task, total=self._num_expected)

    @property
    def num_done(self) -> int:
        """Number of requests of the task that this process answered."""
        return self._num_done

    def advance(self, num_requests: int = 1) -> None:
        """Count answered requests; negative if some must be answered again."""
        self._num_done += num_requests
        num_done = self._num_done + (self.others.value if self.others is not None else 0)
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=num_done)
            return
        now = self._clock()
        if now - self._last_line >= max(_SECONDS_BETWEEN_LINES, _SHARE_BETWEEN_LINES * (now - self._started)):
            self.say(f"{self._task}: {num_done:,} of {self._num_expected:,} requests")
