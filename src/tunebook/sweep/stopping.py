"""Requests to stop a sweep (Ctrl-C, SIGTERM, the end of the terminal), handed on to every trial that runs.

The first lets them save and end; after it Ctrl-C lets them end without saving, and the next kills them. No further
trial is started.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tunebook.train.rank_process import RequestCount

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
        # What is ignored stays so: nohup ignores the end of the terminal, a shell Ctrl-C for what is in the background.
        numbers = [number for number in _REQUESTS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
