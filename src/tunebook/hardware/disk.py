"""Telling a full disk from other failures: the libraries that write weights each say it in their own way."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tunebook.errors import DoesNotFitError

_CODES = (errno.ENOSPC, errno.EDQUOT)
# safetensors passes on the system's words; torch's zip writer only says that it is not where it should be, and C++'s
# streams that they failed.
_WORDS = (
    "No space left on device",
    "Disk quota exceeded",
    "PytorchStreamWriter failed",
    "enforce fail at inline_container",
    "iostream error",
)
# As the errors of `disk-full` begin, the two below and those of what looks for room before it writes.
_TOLD = re.compile(r"\bno space (is )?left\b|\bthe disk of .+ (is full;|has [\d.,]+ [GM]iB free\b)", re.IGNORECASE)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    folder = folder.expanduser().absolute()
    # os.path, to which what lies in a closed folder is not there: Path raises PermissionError.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, is a disk or a quota without room."""
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in _CODES) or any(words in str(seen) for words in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def tells_of_full_disk(reason: str) -> bool:
    """Whether the reason for which a run failed, as it was recorded, is a disk or a quota without room."""
    return _TOLD.search(reason) is not None


def no_space(what: str, folder: Path, advice: str) -> DoesNotFitError:
    """The error for `what` that its folder's disk has no room for; `advice` is what to do."""
    return DoesNotFitError(
        f"no space is left for {what}: the disk of {folder}, or a quota on it, is full; {advice}",
        problem_id="disk-full",
    )


def disk_full(folder: Path) -> DoesNotFitError:
    """The error for a disk that filled up while a run wrote to it."""
    return DoesNotFitError(
        f"the disk of {folder} is full; free some space, keep fewer checkpoints (training.keep_checkpoints=1), or "
        "write elsewhere: outputs=/a/folder/on/another/disk",
        problem_id="disk-full",
    )
