"""Who is at work in a run folder: a lock that the system gives back by itself when its holders end, however they do.

The launcher takes it and its ranks keep it open. So a run whose manifest says `running` but whose lock is free was
killed, and can be gone on with.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunebook.errors import RequestError

LOCK_FILE = ".lock"


@contextmanager
def working_in(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; yields the file descriptor that holds it. Raises: RequestError when somebody else does.

    On a file system without locks nothing is held.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            raise RequestError(
                f"a run is at work in {folder}; wait for it, or start another in a folder of its own (without "
                "--run-folder, or with training.resume=never)",
                problem_id="run-is-running",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def is_worked_in(folder: Path) -> bool:
    """Whether some process holds the folder's lock; a folder that never had one counts, since nothing is known."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return True
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return kind == fcntl.LOCK_EX  # no locks here: go ahead, but never take over what may be another's
    return True
