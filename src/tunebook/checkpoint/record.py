"""`complete.json`: the record that a checkpoint has once it is complete, with the size and hash of every file in it.

It is written last, after every rank has written and flushed its part, so a checkpoint without one is not there. Nothing
here imports torch: the launcher, the export and the sweeps read records too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunebook.files import read_json

FORMAT = 1  # raised when a key changes its meaning or goes away
RECORD_FILE = "complete.json"
PENDING_FILE = ".complete.json"  # the record of a checkpoint that has its name, but not yet its record
CHECKPOINTS_FOLDER = "checkpoints"
UNFINISHED_FOLDER = "_unfinished"  # in it; what is written to it is whole or gone. Uploads leave names with `_` out
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a file must be."""

    size: int  # bytes
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a checkpoint belongs to. One that differs in any of this goes on to another result."""

    strategy: str  # the name of a `Strategy`
    peft: str  # the name of a `PeftMethod`
    world_size: int
    model: dict[str, Any]
    config_sha256: str
    hash_version: int = 1  # of config_sha256; earlier checkpoints do not say
    settings: dict[str, Any]  # every setting that changes the result, to say which keys differ
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
    stall_seconds: float | None = None  # of those, that training stood still; None: all, as before there was a choice
    versions: dict[str, str]  # of the packages that wrote it
    identity: Identity
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What its files take, without the record."""
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)


class UnreadableRecordError(Exception):
    """There is no record that can be relied on; the text says why, after the checkpoint's name."""


class NewerRecordError(UnreadableRecordError):
    """The record is of a later version of Tunebook."""


def step_of(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name, `checkpoint-<step>`; None for any other name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a folder of checkpoints."""
    return folder / f"checkpoint-{step}"


def named_as_checkpoints(folder: Path) -> list[Path]:
    """Every folder `checkpoint-<step>` of a folder of checkpoints, newest first, complete or not."""
    found = [path for path in folder.glob("checkpoint-*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def read_record(checkpoint: Path) -> CheckpointRecord:
    """The record of a checkpoint. Raises: UnreadableRecordError for none, a damaged or a newer one; OSError."""
    path = checkpoint / RECORD_FILE
    if not path.is_file():
        raise UnreadableRecordError(_without_record(checkpoint))
    try:
        content = read_json(path)
        written_as = content["format"]
        if isinstance(written_as, int) and written_as > FORMAT:
            raise NewerRecordError(
                f"its {RECORD_FILE} has format {written_as} and this Tunebook reads up to {FORMAT}: go on with the "
                "version that wrote it, or a later one"
            )
        identity = Identity(**content.pop("identity"))
        files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
        record = CheckpointRecord(identity=identity, files=files, **content)
    except UnreadableRecordError:
        raise
    except Exception as error:  # not JSON, or not what we write: whatever it is, it cannot be relied on
        raise UnreadableRecordError(f"its {RECORD_FILE} is damaged ({type(error).__name__})") from error
    if not record.files:
        raise UnreadableRecordError(f"its {RECORD_FILE} lists no files")
    return record


def _without_record(checkpoint: Path) -> str:
    if (checkpoint / PENDING_FILE).is_file():
        return "it was not written to its end"
    return (
        f"it has no {RECORD_FILE}: it is no checkpoint, was not written to its end, or is not by this Tunebook (an "
        "older version or another program)"
    )


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What lies in a checkpoint: regular files by their path, with sizes; and what else there is, which is suspect."""

    sizes: dict[str, int]
    others: list[str]


def list_files(checkpoint: Path) -> Listing:
    """Every file below a checkpoint but its record. Links are not followed, since they may lead out of the folder.

    Raises: OSError.
    """
    sizes: dict[str, int] = {}
    others: list[str] = []
    for entry, name in _walk(checkpoint, ""):
        if entry.is_file(follow_symlinks=False):
            sizes[name] = entry.stat(follow_symlinks=False).st_size
        else:
            others.append(name)
    for name in (RECORD_FILE, PENDING_FILE):
        sizes.pop(name, None)
    return Listing(sizes=sizes, others=sorted(others))


def _walk(folder: Path, prefix: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield entry, f"{prefix}{entry.name}"
