"""Which checkpoint a run resumes from: the newest that is complete, of this run, and verified by every hash.

The run's own checkpoints come first, then those that `training.resume` names. The launcher finds the expected one
without reading files and without torch, so that it can refuse before anything starts. The ranks divide the files to
hash among them. Every skipped checkpoint is reported with the reason.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunebook.checkpoint.collectives import on_every_rank, on_first_rank, rank_and_size, share_of
from tunebook.checkpoint.identity import require_same
from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    RECORD_FILE,
    CheckpointRecord,
    Identity,
    UnreadableRecordError,
    named_as_checkpoints,
    step_of,
)
from tunebook.checkpoint.retention import clean_up
from tunebook.checkpoint.verify import complete_record, wrong_hash
from tunebook.config.book import resolve_path
from tunebook.config.choices import RESUME_WORDS
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, RequestError


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A folder `checkpoint-<step>`: its record, or why it cannot be used."""

    path: Path
    record: CheckpointRecord | None
    why_not: str | None = None


def expected_checkpoint(config: RunConfig, run: Path | None, own: Identity) -> Path | None:
    """The checkpoint that the ranks will resume from unless its content is damaged; None to start at the beginning.

    Raises: RequestError for a checkpoint of another run, or a named folder without one; DataError for a named
    checkpoint that is damaged.
    """
    found = candidates_in(run / CHECKPOINTS_FOLDER) if run is not None else []
    named = named_by(config)
    usable = next((candidate for candidate in found if candidate.record is not None), None)
    if usable is None and named is not None:
        found = named_candidates(named)
        usable = next((candidate for candidate in found if candidate.record is not None), None)
        if usable is None:
            raise damaged(named, found, "; ".join(f"{one.path.name}: {one.why_not}" for one in found))
    if usable is None or usable.record is None:
        return None
    require_same(usable.path, usable.record, own, config.training.resume_anyway)
    return usable.path


def named_by(config: RunConfig) -> Path | None:
    """The folder that `training.resume` names; None for one of its keywords."""
    word = config.training.resume
    return None if word in RESUME_WORDS else resolve_path(word)


def same_command(config: RunConfig, option: str = "") -> str:
    """The hint for resuming a stopped run or sweep: with `never` the same command would start a new one.

    `option` is an option that the command also needs.
    """
    without = " without training.resume=never" if config.training.resume == "never" else ""
    return f"the same command{f' with {option}' if option else ''}{without}"


def candidates_in(checkpoints: Path) -> list[Candidate]:
    """Every folder with the name of a checkpoint, newest first, its files compared by name and size."""
    return [_candidate(path) for path in named_as_checkpoints(checkpoints)]


def named_candidates(named: Path) -> list[Candidate]:
    """The checkpoints of a folder that the user named, itself one or a run's; newest first.

    Raises: RequestError for a folder that is neither, and for checkpoints of other programs.
    """
    named = named.resolve()
    found = candidates_in(named / CHECKPOINTS_FOLDER) or candidates_in(named) or [_candidate(named)]
    if not any((candidate.path / RECORD_FILE).is_file() for candidate in found):
        why = found[0].why_not if named.is_dir() else f"there is no such folder on {socket.gethostname()}"
        raise RequestError(
            f"training.resume={named} is no checkpoint to resume from: {why}; name a run folder, or a folder "
            f"checkpoint-<step> in its checkpoints; to start from other weights: model.path={named}",
            problem_id="checkpoint-not-usable",
        )
    return found


def damaged(named: Path, found: list[Candidate], why: str) -> DataError:
    """The error for a folder, named by the user, whose checkpoints are all damaged."""
    which = "its checkpoint is damaged" if len(found) == 1 else f"none of its {len(found)} checkpoints is complete"
    return DataError(
        f"training.resume={named}: {which}: {why}; name another checkpoint, restore this one from a copy, or start "
        "again with training.resume=never",
        problem_id="checkpoint-damaged",
    )


def choose_checkpoint(config: RunConfig, run: Path, own: Identity, report: Callable[[str], None]) -> Path | None:
    """The verified checkpoint that the ranks resume from; None to start at the beginning.

    A collective; `report` is called on every rank. Raises: as `expected_checkpoint`.
    """
    checkpoints = run / CHECKPOINTS_FOLDER
    on_first_rank(lambda: clean_up(checkpoints))
    found = on_first_rank(lambda: candidates_in(checkpoints))
    chosen = _first_verified(found, config, own, report)
    named = named_by(config)
    if chosen is not None or named is None:
        return chosen
    found = on_first_rank(lambda: named_candidates(named))
    chosen = _first_verified(found, config, own, report)
    if chosen is None:
        raise damaged(named, found, "the reasons are printed above")
    return chosen


def require_verified(checkpoint: Path) -> None:
    """Refuse a damaged best checkpoint; each rank reads a share of it. Raises: DataError."""
    try:
        why = _wrong_anywhere(checkpoint, on_first_rank(lambda: complete_record(checkpoint)))
    except UnreadableRecordError as error:
        why = str(error)
    if why is not None:
        raise DataError(
            f"{checkpoint} cannot be loaded: {why}. It is the best by validation loss, so no other takes its place. "
            "Restore it from a copy and type the same command again; or remove it and use the best of the others: "
            "'training.resume_anyway=[best]'",
            problem_id="checkpoint-damaged",
        )


def _first_verified(
    found: list[Candidate], config: RunConfig, own: Identity, report: Callable[[str], None]
) -> Path | None:
    for candidate in found:
        why, record = candidate.why_not, candidate.record
        if record is not None:
            require_same(candidate.path, record, own, config.training.resume_anyway)
            why = _wrong_anywhere(candidate.path, record)
            if why is None:
                return candidate.path
        report(f"{candidate.path} is passed over: {why}")
    return None


def _wrong_anywhere(checkpoint: Path, record: CheckpointRecord) -> str | None:
    """Why a checkpoint is damaged, on every rank; each rank reads its share of the files."""
    rank, num_ranks = rank_and_size()
    mine = share_of({name: entry.size for name, entry in record.files.items()}, rank, num_ranks)
    found = on_every_rank(lambda: wrong_hash(checkpoint, [(name, record.files[name]) for name in mine]))
    return next((why for why in found if why is not None), None)


def _candidate(path: Path) -> Candidate:
    try:
        record = complete_record(path)
    except UnreadableRecordError as error:
        return Candidate(path=path, record=None, why_not=str(error))
    if step_of(path) not in (None, record.step):
        return Candidate(path=path, record=None, why_not=f"its record is of step {record.step}")
    return Candidate(path=path, record=record)
