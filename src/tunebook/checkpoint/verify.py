"""Verify a checkpoint: first its files and their sizes (cheap; decides if it is complete), then every hash.

A checkpoint is loaded only after both checks. A file that the record does not list counts as damage too, since loaders
select files by name. The checks detect damage, not tampering: whoever can change a file can also change its hash in the
record. So loading runs no code (`checkpoint.unpickling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    RECORD_FILE,
    CheckpointRecord,
    FileEntry,
    UnreadableRecordError,
    list_files,
    named_as_checkpoints,
    read_record,
    step_of,
)
from tunebook.errors import DataError
from tunebook.files import sha256_file
from tunebook.record.manifest import MODEL_FILES, manifest_or_empty
from tunebook.record.run_folder import MODEL_FOLDER

_WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A folder with the name of a checkpoint: its record if it is complete, or why it is not."""

    path: Path
    record: CheckpointRecord | None = None
    problem: str | None = None


def examine(checkpoint: Path) -> Candidate:
    """Compare the files of a checkpoint with its record, by name and size."""
    try:
        record = read_record(checkpoint)
        sizes = list_files(checkpoint)
    except UnreadableRecordError as error:
        return Candidate(path=checkpoint, problem=str(error))
    except OSError as error:
        return Candidate(path=checkpoint, problem=f"it cannot be read ({error.strerror})")
    problem = _wrong_size(sizes, record.files)
    if problem is None and (added := sorted(sizes.keys() - record.files.keys())):
        problem = f"{added[0]} in it is not listed in its {RECORD_FILE}; remove it to use this checkpoint"
    if problem is None and step_of(checkpoint) not in (None, record.step):
        problem = f"its record is of step {record.step}"
    return Candidate(path=checkpoint, record=record if problem is None else None, problem=problem)


def candidates_in(checkpoints: Path) -> list[Candidate]:
    """Every folder with the name of a checkpoint, newest first."""
    return [examine(path) for path in named_as_checkpoints(checkpoints)]


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder is a complete checkpoint: its record exists and every file has its size."""
    return examine(checkpoint).record is not None


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Every complete checkpoint of a folder of checkpoints, newest first."""
    return [candidate.path for candidate in candidates_in(checkpoints) if candidate.record is not None]


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    return next(iter(complete_checkpoints(run / CHECKPOINTS_FOLDER)), None)


def skipped_checkpoints(run: Path) -> dict[Path, str]:
    """The checkpoints of a run that are newer than its newest complete one, and why each is not complete."""
    newer = takewhile(lambda candidate: candidate.record is None, candidates_in(run / CHECKPOINTS_FOLDER))
    return {candidate.path: str(candidate.problem) for candidate in newer}


def _wrong_size(sizes: Mapping[str, int], files: Mapping[str, FileEntry]) -> str | None:
    """The first file that is missing or has another size than recorded."""
    for name, entry in sorted(files.items()):
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != entry.size:
            return f"{name} has {sizes[name]:,} bytes and was written with {entry.size:,}"
    return None


def wrong_hash(checkpoint: Path, files: Iterable[tuple[str, FileEntry]]) -> str | None:
    """Why the first damaged file does not match its record; None if all match. Reads the files completely."""
    for name, entry in files:
        try:
            sha256 = sha256_file(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if sha256 != entry.sha256:
            return f"{name} is not what was written: its SHA-256 is {sha256[:12]}..., not {entry.sha256[:12]}..."
    return None


def verified_record(checkpoint: Path) -> CheckpointRecord:
    """The record of a checkpoint after this process has verified every file. Raises: DataError saying what is wrong."""
    candidate = examine(checkpoint)
    record, problem = candidate.record, candidate.problem
    if record is not None:
        problem = wrong_hash(checkpoint, record.files.items())
    if record is None or problem is not None:
        raise DataError(
            f"{checkpoint} cannot be used: {problem}; name an older checkpoint, or restore this one from a copy",
            problem_id="checkpoint-damaged",
        )
    return record


def require_unchanged_model(run: Path, *, by_hash: bool = False) -> None:
    """Refuse changed weights in a run's `model/`: by size, or by hash, which reads them.

    Raises: DataError saying what is wrong.
    """
    recorded = manifest_or_empty(run).get(MODEL_FILES) or {}
    weights = {name: FileEntry(**entry) for name, entry in recorded.items() if name.endswith(_WEIGHTS)}
    paths = {name: run / MODEL_FOLDER / name for name in weights}
    problem = _wrong_size({name: path.stat().st_size for name, path in paths.items() if path.is_file()}, weights)
    if problem is None and by_hash:
        problem = wrong_hash(run / MODEL_FOLDER, weights.items())
    if problem is not None:
        raise DataError(
            f"{run / MODEL_FOLDER} cannot be used: {problem}; restore it from a copy, or make a model of a checkpoint: "
            f"tunebook export {run} --checkpoint STEP",
            problem_id="model-changed",
        )
