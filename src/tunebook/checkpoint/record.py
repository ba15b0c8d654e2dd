"""`complete.json`: the record of a complete checkpoint, with the size and hash of every file in it.

It is written last, after every rank has written and flushed its part: without it a checkpoint does not count. Nothing
here imports torch, since the launcher, the export and the sweeps read records too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunebook.files import read_json

FORMAT = 1  # raised when a key changes its meaning or goes away
RECORD_FILE = "complete.json"
PENDING_FILE = ".complete.json"  # in a checkpoint that has its final name but no record yet
CHECKPOINTS_FOLDER = "checkpoints"
UNFINISHED_FOLDER = "_unfinished"  # contains checkpoints that are being written. Uploads skip names with `_`
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The size and hash that a file must have."""

    size: int  # bytes
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The run that a checkpoint belongs to. A run that differs in any of these fields gives another result."""

    strategy: str  # the name of a `Strategy`
    peft: str  # the name of a `PeftMethod`
    world_size: int
    model: dict[str, Any]
    config_sha256: str
    settings: dict[str, Any]  # every setting that changes the result, to name the keys that differ
    data_sha256: str
    tokenizer_sha256: str | None
    chat_template_sha256: str | None


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """The content of `complete.json`; `files` by their path in the checkpoint, with `/`."""

    format: int = FORMAT
    step: int
    saved: str  # when, in UTC
    seconds: float  # that saving it took, up to this record
    versions: dict[str, str]  # of the packages that wrote it
    identity: Identity
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of its files without the record."""
        return sum(entry.size for entry in self.files.values())


class UnreadableRecordError(Exception):
    """No complete checkpoint; the message gives the reason, to follow the checkpoint's name."""


def step_of(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name, `checkpoint-<step>`; None for any other name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a folder of checkpoints."""
    return folder / f"checkpoint-{step}"


def named_as_checkpoints(folder: Path) -> list[Path]:
    """Every folder `checkpoint-<step>` of a folder of checkpoints, newest first, complete or not."""
    paths = [path for path in folder.glob("checkpoint-*") if step_of(path) is not None and path.is_dir()]
    return sorted(paths, key=lambda path: step_of(path) or 0, reverse=True)


def read_record(checkpoint: Path) -> CheckpointRecord:
    """The record of a checkpoint. Raises: UnreadableRecordError for none or a damaged one."""
    path = checkpoint / RECORD_FILE
    if not path.is_file():
        if (checkpoint / PENDING_FILE).is_file():
            raise UnreadableRecordError("it was not written completely")
        raise UnreadableRecordError(f"it has no {RECORD_FILE}: it is no checkpoint of Tunebook, or is not complete")
    try:
        content = read_json(path)
        identity = Identity(**content.pop("identity"))
        files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
        record = CheckpointRecord(identity=identity, files=files, **content)
    except Exception as error:  # not JSON, or not what Tunebook writes
        raise UnreadableRecordError(f"its {RECORD_FILE} is damaged ({type(error).__name__})") from error
    if record.format != FORMAT:
        raise UnreadableRecordError(f"its {RECORD_FILE} has format {record.format}, and this Tunebook reads {FORMAT}")
    if not record.files:
        raise UnreadableRecordError(f"its {RECORD_FILE} lists no files")
    return record


def list_files(checkpoint: Path) -> dict[str, int]:
    """The size of every file below a checkpoint except its record, by path.

    Raises: UnreadableRecordError for a link or a special file, which may lead anywhere.
    """
    sizes: dict[str, int] = {}
    for folder, folders, files in os.walk(checkpoint):
        for name in (*folders, *files):
            path = Path(folder, name)
            inside = path.relative_to(checkpoint).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise UnreadableRecordError(f"{inside} in it is a link or no regular file; checkpoints have none")
            if name in files and inside not in (RECORD_FILE, PENDING_FILE):
                sizes[inside] = path.stat().st_size
    return sizes
