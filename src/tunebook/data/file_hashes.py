"""Hashes of large files, remembered by size and times, so that a second start need not read gigabytes again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tunebook.config.cache import CACHE_VARIABLE, cache_root, remember
from tunebook.data.files import hash_file

__all__ = ["CACHE_VARIABLE", "cache_root", "remembered_hash", "remembered_hashes"]

# A file changed within this time of being hashed could change again without its times showing it.
_SETTLED_NS = 2_000_000_000


def remembered_hash(path: Path) -> str:
    """The SHA-256 of a file; it is read only if it changed since the last time it was asked for."""
    return remembered_hashes([path], hash_file)[path]


def remembered_hashes(paths: Iterable[Path], hash_one: Callable[[Path], str], way: str = "") -> dict[Path, str]:
    """The hashes of files by `hash_one`, which reads only those that changed since they were asked for last.

    `way` tells what is remembered of one way of hashing from another's.
    """
    memory_file = cache_root() / "file_hashes.json"
    memory = _read(memory_file)
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
    if learnt:  # another process' additions may be lost, which only costs hashing again
        remember(memory_file, json.dumps(_read(memory_file) | learnt))
    return hashes


def _times(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(file: Path) -> dict[str, list[Any]]:
    try:
        memory: dict[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory
