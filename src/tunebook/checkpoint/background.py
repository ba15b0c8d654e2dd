"""One piece of work at a time in a thread beside the training; how it ended is told to who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Background:
    """A thread for work that reads and writes files, which lets Python go on meanwhile. It holds no tensors."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether what was started has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Start some work; what was started before has been waited for."""
        assert self._thread is None
        # A daemon: a process that is told to end at once does not wait for a disk.
        self._thread = Thread(target=self._do, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Wait until the work has ended, if there is any; the error that it ended with. Ctrl-C breaks the wait off."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
