"""Answers about models that take seconds to find, kept in the cache folder by what was asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.files import cache_root, remember, sha256_text
from tunebook.train.requirements import installed_version

_FORM = 13  # increase when the answer to the same question changes, so that cached answers are not reused
_PACKAGES = ("torch", "transformers", "peft", "trl")
_known: dict[Path, Any] = {}  # in this process, by the file that keeps it
_announced: set[str] = set()


def answered(folder: str, inputs: Any, find: Callable[[], Any], notice: str) -> Any:
    """The answer, as JSON, from the cache folder or from `find`. A terminal gets the notice before it is found."""
    versions = {package: installed_version(package) for package in _PACKAGES}
    question = json.dumps([_FORM, versions, inputs], sort_keys=True, default=str)
    file = cache_root() / folder / f"{sha256_text(question)}.json"
    if file not in _known:
        try:
            _known[file] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or damaged
            if sys.stderr.isatty() and notice not in _announced:  # to keep JSON output and logs clean
                print(notice, file=sys.stderr, flush=True)
                _announced.add(notice)
            _known[file] = find()
            remember(file, json.dumps(_known[file]))
    return _known[file]
