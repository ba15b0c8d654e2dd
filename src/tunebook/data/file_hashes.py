"""Hashes of data files, remembered by size and times, so that a second start need not read gigabytes again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tunebook.data.files import hash_file

CACHE_VARIABLE = "TUNEBOOK_CACHE"

# A file changed within this time of being hashed could change again without its times showing it.
_SETTLED_NS = 2_000_000_000


def cache_root() -> Path:
    """The folder of everything that can be made again: $TUNEBOOK_CACHE, or ~/.cache/tunebook."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "tunebook"


def remembered_hash(path: Path) -> str:
    """The SHA-256 of a file; it is read only if it changed since the last time it was asked for."""
    status = path.stat()
    times = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory_file = cache_root() / "file_hashes.json"
    memory = _read(memory_file)
    known = memory.get(str(path))
    if known is not None and known[:-1] == times:
        return str(known[-1])
    found = hash_file(path)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        _write(memory_file, memory | {str(path): [*times, found]})
    return found


def _read(file: Path) -> dict[str, list[Any]]:
    try:
        memory: dict[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory


def _write(file: Path, memory: dict[str, list[Any]]) -> None:
    """Replace the file in one go. Another process' additions may be lost, which only costs hashing again."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(memory), encoding="utf-8")
        beside.replace(file)
    except OSError:  # it only saves time; where nothing can be written, `prepare` says so
        if beside.parent.is_dir() and os.access(beside.parent, os.W_OK):
            beside.unlink(missing_ok=True)
