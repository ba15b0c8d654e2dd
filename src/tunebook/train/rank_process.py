"""A rank's process: how it starts, how it is asked to stop, and how it ends. Imports nothing heavy.

Ctrl-C, SIGTERM, Slurm's SIGUSR1 and a file in the run folder ask a rank to finish the step, save and end with exit code
6. The request is only recorded: ranks are in the middle of collectives, so they agree at the end of a step.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tunebook.errors import InvalidTrainingError, StoppedError
from tunebook.processes import handling_signals
from tunebook.record.run_folder import STOP_FILE

# Exit codes of endings that all ranks reach together.
AGREED_ENDINGS = (0, StoppedError.exit_code, InvalidTrainingError.exit_code)
_READ_EVERY_S = 1.0  # of the file, which may be on a network file system
_SEEN_WITHIN_S = 2.0  # torchrun polls its processes ten times a second


class StopRequest:
    """Whether this process has been asked to stop: by a signal, or by a file in `folder`, for which rank 0 looks."""

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, folder: Path | None = None) -> None:
        self._name: str | None = None
        self._file = None if folder is None else folder / STOP_FILE
        self._read_at = float("-inf") if os.environ.get("RANK", "0") == "0" else float("inf")

    @property
    def name(self) -> str | None:
        """What asked this process to stop; None if nothing did."""
        now = time.monotonic()
        if self._name is None and now - self._read_at > _READ_EVERY_S:
            self._read_at, self._name = now, self.in_file()
        return self._name

    def in_file(self) -> str | None:
        """What the file says; None if there is none."""
        with suppress(OSError):
            return (self._file.read_text().strip() or None) if self._file is not None else None
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals of this process (main thread only); restore the handlers afterwards.

        Ray's workers block some, and their children inherit that: a pending signal arrives now.
        """
        with handling_signals(self.signals, self._note, takes_ignored=True):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
            yield

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._name = signal.Signals(number).name


def hide_import_warnings() -> None:
    """Hide what torch 2.13 logs in every process that imports torchao 0.18: two warnings for torchao's developers."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


class RankEnd:
    """Ends a rank's process without Python's finalization. Create it before the libraries are imported.

    Exit handlers run in reverse order, so those of the libraries run first. Python's finalization never runs: a thread
    of gloo that releases a tensor during it aborts the process (pytorch#190489), after a run that is complete.
    """

    def __init__(self) -> None:
        self._exit_code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self._exit_code is not None:
            _end_at_once(self._exit_code)

    def leave(self, exit_code: int) -> NoReturn:
        """End this process; immediately and without exit handlers if it failed alone.

        NCCL's exit handler waits for all ranks, which may wait for this one in a collective. Before it ends, the
        process waits for a moment: if it failed because another rank was killed, torchrun must see that rank's end
        first.
        """
        if exit_code in AGREED_ENDINGS:
            self._exit_code = exit_code
            sys.exit(exit_code)
        _flush()  # torchrun may kill it while it waits
        if os.environ.get("WORLD_SIZE", "1") != "1":
            time.sleep(_SEEN_WITHIN_S)
        _end_at_once(exit_code)


def _end_at_once(exit_code: int) -> NoReturn:
    _flush()
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed output is not a failure of the run
            stream.flush()
