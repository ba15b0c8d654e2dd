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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.errors import DataError

CACHE_VARIABLE = "TUNEBOOK_CACHE"
# A file that changed within this time before it was hashed may change again without another time stamp.
_SETTLED_NS = 2_000_000_000


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` atomically. Raises: OSError; the old file is then unchanged."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """As `atomic_write_text`, for any content."""
    # Not tempfile: its files are readable only by their owner, and run folders are shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
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
    return remembered_hashes([path])[path]


def remembered_hashes(paths: Iterable[Path]) -> dict[Path, str]:
    """The SHA-256 of files, several at a time. Only those that changed since the last call are read."""
    memory_file = cache_root() / "file_hashes.json"
    memory = _read_memory(memory_file)
    times = {path: _times(path.stat()) for path in paths}
    known = {path: memory.get(str(path), []) for path in times}
    changed = [path for path in times if known[path][:-1] != times[path]]
    with ThreadPoolExecutor() as threads:
        new = dict(zip(changed, threads.map(sha256_file, changed), strict=True))
    now = time.time_ns()
    learnt = {str(path): [*times[path], new[path]] for path in changed if now - max(times[path][1:3]) > _SETTLED_NS}
    if learnt:  # another process' additions may be lost, and are hashed again then
        remember(memory_file, json.dumps(_read_memory(memory_file) | learnt))
    return {path: new.get(path) or str(known[path][-1]) for path in times}


def _times(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_memory(file: Path) -> dict[str, list[Any]]:
    try:
        memory: dict[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory
