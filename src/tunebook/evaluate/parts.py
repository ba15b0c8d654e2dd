"""Finished tasks of an evaluation on the disk, so that one that was stopped or killed goes on where it was.

Each task's result and answers are one file in `evaluation/parts/`, written in one step, with a key over everything that
decides them. The prompts are no part of the key but compared as well: they hold the items, the examples before them,
the chat template and the system prompt as the model saw them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunebook.errors import DataError
from tunebook.evaluate.results import Answer
from tunebook.files import atomic_write_text, read_json, sha256_text

FORMAT = 1  # raised when a part of before is no longer one of now
FOLDER = "parts"
_KEY_LENGTH = 16
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One finished task."""

    task: str
    key: str
    requests_sha256: str  # of what the model was asked, and of the items it was asked about
    harness: dict[str, Any]  # what the harness' groups are made of: metrics, settings, version, ...
    score: dict[str, Any] | None  # as in the record; None: the task has no score of its own
    answers: list[Answer]
    generated: dict[str, Any] | None  # the harness' results, of a task with programs that are judged afterwards
    batch_size: int | None
    seconds: float
    finished: str  # ISO 8601, UTC
    bound: dict[str, Any] = field(default_factory=dict)  # where answers ended, as the record says it


@dataclass(kw_only=True)
class Parts:
    """The parts of a run's evaluations."""

    folder: Path
    damaged: list[str] = field(default_factory=list)  # what was found and could not be used, for people

    def read(self, task: str, key: str) -> Part | None:
        """The part of a task under this key; None where there is none, or only a damaged one (see `damaged`)."""
        file = self._file(task, key)
        if not file.is_file():
            return None
        try:
            stored = read_json(file)
            if not isinstance(stored, dict) or stored.pop("sha256", None) != _content_hash(stored):
                raise DataError(f"{file} is not as it was written", problem_id="broken-record")
            if stored.pop("format") != FORMAT or stored["key"] != key:
                return None
            answers = [Answer(**answer) for answer in stored.pop("answers")]
            return Part(**stored, answers=answers)
        except (DataError, OSError, KeyError, TypeError) as error:
            self.damaged.append(f"{file} is damaged ({str(error).splitlines()[0]}); {task} is evaluated again")
            return None

    def write(self, part: Part) -> None:
        """Keep a finished task. Raises: ValueError for a number that is not finite, which JSON does not have."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **asdict(part)}
        text = json.dumps({**content, "sha256": _content_hash(content)}, ensure_ascii=False, allow_nan=False)
        atomic_write_text(self._file(part.task, part.key), text + "\n")

    def _file(self, task: str, key: str) -> Path:
        return self.folder / f"{_NOT_IN_NAMES.sub('-', task)}-{key[:_KEY_LENGTH]}.json"


def key_of(ingredients: dict[str, Any]) -> str:
    """The hash of everything that decides a task's result."""
    return sha256_text(json.dumps({"format": FORMAT, **ingredients}, sort_keys=True, default=str))


def requests_hash(items: Iterable[tuple[int, str, list[Any]]]) -> str:
    """The hash of (number of the item, hash of the item, arguments of its requests), in any order."""
    ordered = sorted(items, key=lambda item: item[0])
    return sha256_text(json.dumps(ordered, sort_keys=True, default=str, ensure_ascii=False))


def _content_hash(content: dict[str, Any]) -> str:
    return sha256_text(json.dumps(content, sort_keys=True, ensure_ascii=False))
