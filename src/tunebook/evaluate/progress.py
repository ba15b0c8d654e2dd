"""How far an evaluation is: a rich bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 5.0


class AnswerProgress:
    """Counts answered items; used as a context manager around one evaluation."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._num_done = 0
        self._num_total = 0
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)

    def __enter__(self) -> Self:
        console = Console(file=sys.stderr)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._bar_task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, num_items: int) -> None:
        """Say that this many more items are coming."""
        self._num_total += num_items
        if self._bar is not None:
            self._bar.update(self._bar_task, total=self._num_total)

    def advance(self, num_items: int) -> None:
        """Say that this many more items are answered."""
        self._num_done = min(self._num_done + num_items, self._num_total)
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=self._num_done)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self._label}: {self._num_done} of {self._num_total} answers", file=sys.stderr, flush=True)
