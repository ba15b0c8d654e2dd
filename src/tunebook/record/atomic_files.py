"""Write small files so that a reader, or the next attempt after a crash, finds the old content or the new: never half.

Each file is written beside its destination, flushed to the disk and renamed over it. Used for everything in a run
folder but `metrics.jsonl`, which is appended to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.errors import DataError


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` in one step. Raises: OSError; the old file is then still whole."""
    # Not tempfile: its files are readable by their owner alone, and a run folder is there to be shared.
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON. Raises: ValueError for a number that is not finite (JSON has none)."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises: DataError naming the file and the line where it stops being JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not JSON ({error}); Tunebook writes it in one step, so something else changed it: "
            "restore it from a copy, or remove it to go on without it",
            problem_id="broken-record",
        ) from error


def sha256_text(text: str) -> str:
    """The SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal; reads it piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut; some network file systems refuse, and the file itself is safe already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
