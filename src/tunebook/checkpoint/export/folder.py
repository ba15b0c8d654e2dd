"""The folder of an export: written under a temporary name and renamed when complete. A failed export leaves nothing.

The next export to the same place removes what a killed export left: each export holds a lock on its folder, which ends
with its process.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tunebook.checkpoint.record import CHECKPOINTS_FOLDER
from tunebook.errors import DoesNotFitError, RequestError, TunebookError
from tunebook.files import flush_folder
from tunebook.hardware.disk import is_disk_full

ELSEWHERE = "write elsewhere: --to /a/folder/on/another/disk"


def check_target(folder: Path, run: Path) -> Path:
    """The folder to write as an absolute path. Raises: RequestError if it exists or lies in a checkpoint."""
    folder = folder.expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        what = "is a file" if folder.is_file() else "exists"
        raise RequestError(
            f"{folder} {what}, and an export never writes over anything; name a new folder with --to FOLDER, or remove "
            "it",
            problem_id="export-target",
        )
    for taken in (run / CHECKPOINTS_FOLDER, run / "model"):
        if folder.resolve().is_relative_to(taken.resolve()):
            raise RequestError(
                f"{folder} lies in {taken}, whose files are listed in its records; name another place with --to FOLDER",
                problem_id="export-target",
            )
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A new folder that is renamed to `folder` at the end, and removed with its content after an error.

    Raises: DoesNotFitError if the disk fills up, RequestError if nothing may be written.
    """
    made = [path for path in folder.parents if not path.exists()]
    work, lock = folder, None
    try:
        _remove_leftovers(folder)
        work, lock = _locked_folder(folder)
        yield work
        flush_folder(work)
        _rename(work, folder)
    except BaseException as error:
        if work != folder:
            shutil.rmtree(work, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        problem = _problem(folder, error)
        if problem is not None:
            raise problem from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked_folder(folder: Path) -> tuple[Path, int]:
    """A new folder under another name, and a descriptor that holds its lock, if the file system has locks."""
    while True:
        work = folder.with_name(f"{_unfinished(folder)}{os.getpid()}-{secrets.token_hex(4)}")
        work.mkdir(parents=True)
        lock = os.open(work, os.O_RDONLY)
        if _try_lock(lock) is not False and work.exists():
            return work, lock
        os.close(lock)  # another export removed it as a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed exports to the same place have left; nothing on a file system without locks."""
    for left in folder.parent.glob(f"{glob.escape(_unfinished(folder))}*"):
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY)
            try:
                if _try_lock(lock):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _unfinished(folder: Path) -> str:
    """The beginning of the names of unfinished folders."""
    return f".{folder.name}.unfinished-"


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock was free and is now held; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _rename(work: Path, folder: Path) -> None:
    if folder.exists():  # made meanwhile; an empty folder would be replaced without a message
        raise RequestError(
            f"{folder} was created during the export; name another folder with --to FOLDER",
            problem_id="export-target",
        )
    work.rename(folder)
    flush_folder(folder.parent)


def _problem(folder: Path, error: BaseException) -> TunebookError | None:
    if isinstance(error, TunebookError) or not isinstance(error, Exception):
        return None
    if is_disk_full(error):
        return DoesNotFitError(
            f"the disk of {folder} filled up during the export, and nothing of it was kept; free some space, or "
            f"{ELSEWHERE}",
            problem_id="disk-full",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return RequestError(
            f"{folder} cannot be written: {error.strerror} ({error.filename}); name another place with --to FOLDER",
            problem_id="export-target",
        )
    return None
