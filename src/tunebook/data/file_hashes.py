"""Hashes of data files, remembered by size and times, so that a second start need not read gigabytes again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tunebook.config.cache import CACHE_VARIABLE, cache_root, remember
from tunebook.data.files import hash_file

__all__ = ["CACHE_VARIABLE", "cache_root", "remembered_hash"]

# A file changed within this time of being hashed could change again without its times showing it.
_SETTLED_NS = 2_000_000_000


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
        # Another process' additions may be lost, which only costs hashing again.
        remember(memory_file, json.dumps(memory | {str(path): [*times, found]}))
    return found


def _read(file: Path) -> dict[str, list[Any]]:
    try:
        memory: dict[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory
