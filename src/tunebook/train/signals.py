"""Ctrl-C, SIGTERM and Slurm's SIGUSR1: finish the step, save, end with exit code 6.

The handler only notes the request: ranks are in the middle of collectives, so they agree at the end of a step. Imports
nothing heavy, so that a rank can listen while it still imports torch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether this process has been asked to stop, and by which signal."""

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals of this process (main thread only), and give them back."""
        before = {number: signal.signal(number, self._note) for number in self.signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice by a person: stop now, without saving
        self.name = signal.Signals(number).name
