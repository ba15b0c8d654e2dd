"""Ctrl-C, SIGTERM and Slurm's SIGUSR1: finish the step, save, end with exit code 6.

The handler only notes the request: ranks are in the middle of collectives, so they agree at the end of a step. Imports
nothing heavy, so that a rank can listen while it still imports torch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType


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
    """Counts requests to stop. Only Ctrl-C asks a second time.

    The others come several times for one reason: the kernel tells of the death of each of the parent's threads, and a
    closed terminal is told by the shell and by the kernel. Taken for a second request, which means "do not save", they
    would cost the steps since the last checkpoint.
    """

    def __init__(self) -> None:
        self.num = 0

    def take(self, number: int) -> int:
        """Which request this signal is, from 1; 0 for one that has been counted.

        Nothing is called in here, since a handler is interrupted by the next signal's where it calls something.
        """
        if self.num and number != signal.SIGINT:
            return 0
        self.num += 1
        return self.num


class StopRequest:
    """Whether this process has been asked to stop, and by which signal."""

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals of this process (main thread only), and give them back.

        One that waits, because this process was started with it blocked (`processes`), comes now.
        """
        with handling_signals(self.signals, self._note, takes_ignored=True):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
            yield

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice by a person: stop now, without saving
        self.name = signal.Signals(number).name
