"""The folder of everything that can be made again, and files in it that are replaced in one step."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

CACHE_VARIABLE = "TUNEBOOK_CACHE"


def cache_root() -> Path:
    """$TUNEBOOK_CACHE, or ~/.cache/tunebook."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "tunebook"


def remember(file: Path, text: str) -> None:
    """Write a file of the cache: a reader finds all of it or nothing. Where nothing can be written, nothing is."""
    beside = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError:  # it only saves time
        if beside.parent.is_dir() and os.access(beside.parent, os.W_OK):
            beside.unlink(missing_ok=True)
