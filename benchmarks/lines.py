"""JSON lines of results, and the versions that they were measured with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

Line = dict[str, Any]

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "torchao")


def read_lines(file: Path) -> list[Line]:
    """Read a JSONL file."""
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, lines: Iterable[Line]) -> None:
    """Write a JSONL file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def add_line(line: Line, file: Path | None) -> None:
    """Print a result and append it to a file, if there is one."""
    text = json.dumps(line)
    print(text, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text + "\n")


def surroundings(packages: Iterable[str] = PACKAGES, folders: Iterable[str] = ()) -> Line:
    """The date and the versions of the packages that are installed, those in `folders` first."""
    path = [*folders, *sys.path]
    found = {name: next(iter(metadata.distributions(name=name, path=path)), None) for name in packages}
    versions = {name: package.version for name, package in found.items() if package is not None}
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "packages": versions}


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of losses, step by step. Raises: ValueError for another number of steps."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, reference, strict=True))
