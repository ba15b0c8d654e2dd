"""Resume an evaluation: results of finished tasks are kept on disk and reused by an identical evaluation.

Each task's result and answers are one file in `evaluation/parts/`, written atomically, under a key that hashes
everything that determines them. The prompts are not part of the key but are compared too. They contain the items, their
examples, the chat template and the system prompt as the model saw them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunebook.checkpoint.choose import same_command
from tunebook.config.choices import Weights
from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, first_line
from tunebook.evaluate.results import Answer
from tunebook.facts.attention import WITHOUT_KERNEL
from tunebook.files import atomic_write_text, read_json, sha256_file, sha256_text
from tunebook.model.adapters import is_adapter
from tunebook.model.load import load_architecture, weights_folder
from tunebook.model.weight_files import WEIGHT_FILES
from tunebook.record.run_folder import RUN_FILE

BEFORE, AFTER = "before", "after"  # evaluations that belong to a training
FORMAT = 1  # increment it when older results can no longer be reused
FOLDER = "parts"
_KEY_LENGTH = 16
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_HASHED_WHOLE_BYTES = 64 * 2**20
_END_BYTES = 2**20
_MODEL_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One finished task; the fields are the keys of its file."""

    task: str
    key: str
    requests_sha256: str  # hash of the items and of the model's requests
    harness: dict[str, Any]  # inputs of the harness' group aggregation: metrics, settings, version, ...
    score: dict[str, Any] | None  # as in the record; None: the task has no score of its own
    answers: list[Answer]
    generated: dict[str, Any] | None  # the harness' results of a code task, which is judged later
    batch_size: int | None
    seconds: float
    finished: str  # ISO 8601, UTC
    bound: dict[str, Any] = field(default_factory=dict)  # stop tokens, BOS and device, as in the record


@dataclass(kw_only=True)
class ResultCache:
    """The finished tasks of a run's evaluations."""

    folder: Path
    damaged: list[str] = field(default_factory=list)  # one sentence per unusable file

    def read(self, task: str, key: str) -> TaskResult | None:
        """Return a task's result under this key; None if there is none, or only a damaged one (see `damaged`)."""
        file = self._file(task, key)
        if not file.is_file():
            return None
        try:
            stored = read_json(file)
            if not isinstance(stored, dict) or stored.pop("sha256", None) != _content_hash(stored):
                raise DataError(f"{file} was changed after it was written", problem_id="broken-record")
            if stored.pop("format") != FORMAT or stored["key"] != key:
                return None
            answers = [Answer(**answer) for answer in stored.pop("answers")]
            return TaskResult(**stored, answers=answers)
        except (DataError, OSError, KeyError, TypeError) as error:
            self.damaged.append(f"{file} is damaged ({first_line(error)}); {task} is evaluated again")
            return None

    def write(self, result: TaskResult) -> None:
        """Save a finished task. Raises: ValueError for a non-finite number, which JSON lacks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **asdict(result)}
        text = json.dumps({**content, "sha256": _content_hash(content)}, ensure_ascii=False, allow_nan=False)
        atomic_write_text(self._file(result.task, result.key), text + "\n")

    def _file(self, task: str, key: str) -> Path:
        return self.folder / f"{_NOT_IN_NAMES.sub('-', task)}-{key[:_KEY_LENGTH]}.json"


def cache_key(ingredients: dict[str, Any]) -> str:
    """Hash everything that determines a task's result."""
    return sha256_text(json.dumps({"format": FORMAT, **ingredients}, sort_keys=True, default=str))


def requests_hash(items: Iterable[tuple[int, str, list[Any]]]) -> str:
    """Hash (item number, item hash, arguments of its requests) of all items, in any order."""
    ordered = sorted(items, key=lambda item: item[0])
    return sha256_text(json.dumps(ordered, sort_keys=True, default=str, ensure_ascii=False))


def resume_command(run: Path, when: str) -> str:
    """Return the command that resumes an evaluation, which may be part of a training."""
    if when not in (BEFORE, AFTER):
        return "the same command"
    # Before the first step, a new start finds no progress that leads to the folder, so the command must name it.
    option = f"--run-folder {shlex.quote(str(run))}" if when == BEFORE else ""
    return same_command(load_config(run / RUN_FILE), option)


def model_identity(config: RunConfig, folder: Path | None) -> dict[str, Any]:
    """Describe everything that determines a model's answers except its tokenizer: weights, formats, attention."""
    identity: dict[str, Any] = {
        "master_weights": config.precision.master_weights.name,
        "compute": config.precision.compute.name,
        "peft": config.peft.method.name,
        "is_eager": config.attention.implementation is WITHOUT_KERNEL,
    }
    if folder is not None:
        identity["files"] = file_hashes(folder)
    if folder is None or is_adapter(folder):
        identity["base"] = _base_identity(config)
    return identity


def _base_identity(config: RunConfig) -> dict[str, Any]:
    if config.model.weights is Weights.random:
        import torch

        architecture = load_architecture(config.model).to_json_string(use_diff=False)
        return {
            "seed": config.training.seed,
            "architecture": sha256_text(architecture),
            "drawn_by": torch.__version__,
        }
    return {"files": file_hashes(weights_folder(config.model))}


def file_hashes(folder: Path) -> dict[str, str]:
    """Hash each file of a model folder that its answers depend on.

    Hashing 100 GiB of weights takes minutes. So for large files only size, modification time and both ends count. A
    copy with a new time is evaluated again, but another model is never taken for this one.
    """
    files = {file for pattern in WEIGHT_FILES for file in folder.glob(pattern)}
    files |= {folder / name for name in _MODEL_SETTINGS if (folder / name).is_file()}
    return {file.name: _file_hash(file) for file in sorted(files)}


def _file_hash(file: Path) -> str:
    status = file.stat()
    if status.st_size <= _HASHED_WHOLE_BYTES:
        return sha256_file(file)
    found = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with file.open("rb") as stream:
        found.update(stream.read(_END_BYTES))
        stream.seek(-_END_BYTES, 2)
        found.update(stream.read(_END_BYTES))
    return found.hexdigest()


def _content_hash(content: dict[str, Any]) -> str:
    return sha256_text(json.dumps(content, sort_keys=True, ensure_ascii=False))
