"""Atomic writes of small files, hashes of files, and the cache folder.

A reader, or the next attempt after a crash, finds the old content or the new: each file is written under another name,
flushed to the disk and renamed. All files of a run folder are written so, except `metrics.jsonl`, which is appended to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.errors import DataError

CACHE_VARIABLE = "TUNEBOOK_CACHE"
# A file that changed within this time before it was hashed may change again without another time stamp.
_SETTLED_NS = 2_000_000_000


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` atomically. Raises: OSError; the old file is then unchanged."""
    # Not tempfile: its files are readable only by their owner, and run folders are shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the error that is being raised matters more
            temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON. Raises: ValueError for a number that is not finite."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises: DataError with the file and the line that is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not JSON ({error}). Tunebook writes it atomically, so something else changed it: "
            "restore it from a copy, or remove it to continue without it",
            problem_id="broken-record",
        ) from error


def sha256_text(text: str) -> str:
    """The SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_folder(folder: Path) -> None:
    """Make a rename survive a power failure. Some network file systems refuse; the file itself is safe already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cache_root() -> Path:
    """$TUNEBOOK_CACHE, or ~/.cache/tunebook."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "tunebook"


def remember(file: Path, text: str) -> None:
    """Write a file of the cache; failures are ignored, since the cache only saves time."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, text)


def remembered_hash(path: Path) -> str:
    """The SHA-256 of a file, which is read only if it changed since the last call."""
    return remembered_hashes([path], sha256_file)[path]


def remembered_hashes(paths: Iterable[Path], hash_one: Callable[[Path], str], way: str = "") -> dict[Path, str]:
    """The hashes of files by `hash_one`, which reads only those that changed since the last call.

    `way` separates the cached hashes of different functions.
    """
    memory_file = cache_root() / "file_hashes.json"
    memory = _read_memory(memory_file)
    hashes, learnt = {}, {}
    for path in paths:
        status, key = path.stat(), f"{way}{path}"
        times = _times(status)
        known = memory.get(key)
        if known is not None and known[:-1] == times:
            hashes[path] = str(known[-1])
            continue
        hashes[path] = hash_one(path)
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            learnt[key] = [*times, hashes[path]]
    if learnt:  # another process' additions may be lost, and are hashed again then
        remember(memory_file, json.dumps(_read_memory(memory_file) | learnt))
    return hashes


def _times(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_memory(file: Path) -> dict[str, list[Any]]:
    try:
        memory: dict[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory
