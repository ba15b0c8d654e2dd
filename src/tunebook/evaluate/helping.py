"""What a process does that helps with an evaluation: answer what comes over its pipe, and say how far it is."""

from __future__ import annotations

import signal
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.helpers import ANSWERS, COUNT, FAILED, NO_MEMORY, SAID, Answer
from tunebook.evaluate.progress import AnswerProgress

_SECONDS_BETWEEN_COUNTS = 0.5


class ToldProgress(AnswerProgress):
    """A helper's count of answered requests, told to the process that shows it."""

    def __init__(self, line: Connection) -> None:
        super().__init__("helper")
        self._line = line
        self._num_untold = 0
        self._told_at = 0.0

    def say(self, text: str) -> None:
        """Tell a sentence for people, such as that a batch did not fit: a helper's own output is shown to nobody."""
        self._line.send((SAID, text))

    def advance(self, num_requests: int = 1) -> None:
        """Count, and tell every now and then."""
        self._num_done += num_requests
        self._num_untold += num_requests
        if time.monotonic() - self._told_at >= _SECONDS_BETWEEN_COUNTS:
            self.tell()

    def tell(self) -> None:
        """Tell what has not been told yet."""
        self._told_at = time.monotonic()
        if self._num_untold:
            self._line.send((COUNT, self._num_untold))
        self._num_untold = 0


def leave_signals_to_the_first() -> None:
    """SIGTERM ends a helper at once, which has nothing to save; Ctrl-C is for the first process, which ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve(line: Connection, answer: Answer, progress: ToldProgress) -> None:
    """Answer until the pipe is closed. An error is told, with its traceback in the log, and the next call answered."""
    from lm_eval.api.instance import Instance

    with suppress(EOFError, ConnectionError):
        while True:
            kind, arguments = line.recv()
            requests = [Instance(kind, {}, tuple(given), index) for index, given in enumerate(arguments)]
            try:
                answers = answer(kind, requests)
            except DoesNotFitError as error:
                line.send((NO_MEMORY, error.message))
            except Exception as error:
                traceback.print_exc()
                line.send((FAILED, f"{type(error).__name__}: {error}"))
            else:
                progress.tell()
                line.send((ANSWERS, answers))
