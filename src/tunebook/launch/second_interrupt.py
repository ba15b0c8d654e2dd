"""A second Ctrl-C always ends the command, whatever it is doing.

The commands handle Ctrl-C themselves: most of them end, and those with ranks, trials or jobs let these save first.
Python runs a signal handler only in the main thread, between two Python instructions, so never while the main thread
waits inside a library. Therefore a separate thread counts the signals and ends the process with all its children.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from tunebook.errors import StoppedError
from tunebook.processes import RequestCount, descendants_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PLAIN_WITHIN_S = 1.0  # after the second request, if only Python's KeyboardInterrupt handles it
_HANDLED_WITHIN_S = 10.0  # if the command handles it: its ranks are killed after 2 s, then records are written
_SAME_WITHIN_S = 0.3  # one Ctrl-C: a worker that is forked at this moment may write to the pipe too
_END_OF_WATCH = b"\0"  # no signal has this number
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class _Watch:
    """Ends this process soon after its second request to stop."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="second-interrupt")
        self.forget()

    def forget(self) -> None:
        """Reset the count: the requests so far were for something that has ended."""
        self._count = RequestCount()
        self._last = float("-inf")
        self._end_at: float | None = None

    def _listen(self) -> None:
        while True:
            left_s = None if self._end_at is None else max(0.0, self._end_at - time.monotonic())
            if select.select([self.reading], [], [], left_s)[0]:
                numbers = os.read(self.reading, 64)
                if _END_OF_WATCH in numbers:
                    return
                for number in numbers:
                    self._take(number)
            elif self._end_at is not None:  # or it was forgotten meanwhile
                end_at_once()

    def _take(self, number: int) -> None:
        before, self._last = self._last, time.monotonic()
        is_same = self._last - before < _SAME_WITHIN_S
        if number in _SIGNALS and not is_same and self._count.take(number) == 2:
            is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            self._end_at = time.monotonic() + (_PLAIN_WITHIN_S if is_plain else _HANDLED_WITHIN_S)


_watches: list[_Watch] = []


@contextmanager
def watching_interrupts() -> Iterator[None]:
    """While this block runs, a second Ctrl-C ends the process. For the main thread only."""
    watch = _Watch()
    before = signal.set_wakeup_fd(watch.writing, warn_on_full_buffer=False)
    # A forked worker also gets the terminal's Ctrl-C and would write to the same pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    watch.thread.start()
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        signal.set_wakeup_fd(before)
        os.write(watch.writing, _END_OF_WATCH)
        watch.thread.join()
        os.close(watch.reading)
        os.close(watch.writing)


def forget_interrupts() -> None:
    """Reset the count: the last Ctrl-C has ended what it was meant for, such as an answer in a chat."""
    for watch in _watches:
        watch.forget()


def end_at_once() -> NoReturn:
    """Kill all child processes and end this process, without any clean-up."""
    for process in descendants_of(os.getpid()):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    # Without streams or a console, whose locks the main thread may hold.
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
        os.write(2, b"\ninterrupted twice: ended at once, and nothing more was saved or recorded\n")
    os._exit(StoppedError.exit_code)
