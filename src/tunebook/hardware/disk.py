"""The free space of a disk, and errors of a full one, which each library that writes weights reports differently."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from tunebook.errors import DoesNotFitError, causes

_CODES = (errno.ENOSPC, errno.EDQUOT)
# safetensors passes on the system's message. torch's zip writer and C++'s streams only report that they failed.
_MESSAGES = (
    "No space left on device",
    "Disk quota exceeded",
    "PytorchStreamWriter failed",
    "enforce fail at inline_container",
    "iostream error",
)
FREE_SPACE = (
    "free some space, keep fewer checkpoints (training.keep_checkpoints=1), or write elsewhere: "
    "outputs=/a/folder/on/another/disk"
)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.expanduser().absolute()
    # os.path: Path raises PermissionError below a folder without access.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110


def is_disk_full(error: BaseException) -> bool:
    """True if an error, or one of its causes, is a full disk or quota."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _CODES) or any(text in str(cause) for text in _MESSAGES)
        for cause in causes(error)
    )


def no_space(what: str, folder: Path, advice: str) -> DoesNotFitError:
    """The error for `what` if its folder's disk is full; `advice` is what to do."""
    return DoesNotFitError(
        f"no space is left for {what}: the disk of {folder}, or a quota on it, is full; {advice}",
        problem_id="disk-full",
    )


def disk_full(folder: Path) -> DoesNotFitError:
    """The error for a disk that filled up during a run."""
    return DoesNotFitError(f"the disk of {folder} is full; {FREE_SPACE}", problem_id="disk-full")


def require_space(folder: Path, num_bytes: float, what: str, advice: str = FREE_SPACE) -> None:
    """Raise DoesNotFitError unless the disk of a folder, which need not exist, has space for `what`."""
    disk = shutil.disk_usage(existing(folder))
    # A total of zero: the file system, such as a network mount, does not report sizes. A full one fails on write.
    if disk.total and disk.free < num_bytes:
        raise DoesNotFitError(
            f"the disk of {folder} has {size_text(disk.free)} free and {what} takes about {size_text(num_bytes)}; "
            f"{advice}",
            problem_id="disk-full",
        )


def size_text(num_bytes: float) -> str:
    """Bytes as 64 KiB, 256 MiB, 1.5 TiB."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**exponent:
            return f"{num_bytes / 2**exponent:.4g} {unit}"
    return f"{num_bytes:g} bytes"
