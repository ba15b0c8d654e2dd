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
from tunebook.processes import RequestCount, kill_descendants

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PLAIN_WITHIN_S = 1.0  # after the second request, if only Python's KeyboardInterrupt handles it
_HANDLED_WITHIN_S = 10.0  # if the command handles it: it kills its ranks, then writes records
_END_OF_WATCH = 0  # no signal has this number
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
_counts: list[RequestCount] = []


@contextmanager
def watching_interrupts() -> Iterator[None]:
    """While this block runs, a second Ctrl-C ends the process. For the main thread only."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A forked worker also gets the terminal's Ctrl-C and would write to the same pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    _counts.append(RequestCount())
    thread = threading.Thread(target=_watch, args=(reading,), daemon=True, name="second-interrupt")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, bytes([_END_OF_WATCH]))
        thread.join()
        _counts.pop()
        os.close(reading)
        os.close(writing)


def forget_interrupts() -> None:
    """Reset the count: the last Ctrl-C has ended what it was meant for, such as an answer in a chat."""
    _counts[:] = [RequestCount() for _ in _counts]


def _watch(reading: int) -> None:
    """Count the requests, and end the process some time after the second one, unless that is forgotten meanwhile."""
    end_at: float | None = None
    while True:
        left_s = None if end_at is None else max(0.0, end_at - time.monotonic())
        if not select.select([reading], [], [], left_s)[0]:
            end_at = None
            if _counts[-1].num > 1:
                end_at_once()
            continue
        number = os.read(reading, 1)[0]
        if number == _END_OF_WATCH:
            return
        if number in _SIGNALS and _counts[-1].take(number) == 2:
            is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            end_at = time.monotonic() + (_PLAIN_WITHIN_S if is_plain else _HANDLED_WITHIN_S)


def end_at_once() -> NoReturn:
    """Kill all child processes and end this process, without any clean-up."""
    kill_descendants(os.getpid())
    # Without streams or a console, whose locks the main thread may hold.
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
        os.write(2, b"\ninterrupted twice: ended at once, and nothing more was saved or recorded\n")
    os._exit(StoppedError.exit_code)
