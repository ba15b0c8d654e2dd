"""Which checkpoint the ranks of a run load: the newest that is complete, of this run, and verified by every hash.

The ranks share out the files to be read, so each is read once. What is passed over is said, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tunebook.checkpoint.candidates import Candidate, candidates_in, damaged, named_by, named_candidates
from tunebook.checkpoint.identity import require_same
from tunebook.checkpoint.record import CHECKPOINTS_FOLDER, CheckpointRecord, Identity, read_record
from tunebook.checkpoint.retention import clean_up
from tunebook.checkpoint.together import on_every_rank, on_first_rank, rank_and_size, share_of
from tunebook.checkpoint.verify import why_not_complete, wrong_hash
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError


def choose_checkpoint(config: RunConfig, run: Path, own: Identity, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that the ranks go on from, all of whose files were just read; None to start at the beginning.

    The run's own come first, then what `training.resume` names. A collective; `say` is called on every rank. Raises:
    RequestError for one of another run, of a later version, or for a named one that is none; DataError for a named one
    that is damaged.
    """
    checkpoints = run / CHECKPOINTS_FOLDER
    on_first_rank(lambda: clean_up(checkpoints))
    found = on_first_rank(lambda: candidates_in(checkpoints))
    chosen = _first_sound(found, config, own, say)
    named = named_by(config)
    if chosen is not None or named is None:
        return chosen
    found = on_first_rank(lambda: named_candidates(named))
    chosen = _first_sound(found, config, own, say)
    if chosen is None:
        raise damaged(named, found, "the reasons are said above")
    return chosen


def require_verified(checkpoint: Path) -> None:
    """Refuse a best checkpoint that is not what was written; each rank reads a share of it. Raises: DataError."""
    why = on_first_rank(lambda: why_not_complete(checkpoint))
    if why is None:
        why = _wrong_anywhere(checkpoint, on_first_rank(lambda: read_record(checkpoint)))
    if why is not None:
        raise DataError(
            f"{checkpoint} cannot be loaded: {why}. It is the best by validation loss, so no other is taken in its "
            "place. Restore it from a copy and type the same command again; or remove it, and let the best of those "
            "that are left take its place: 'training.resume_anyway=[best]'",
            problem_id="checkpoint-damaged",
        )


def _first_sound(found: list[Candidate], config: RunConfig, own: Identity, say: Callable[[str], None]) -> Path | None:
    for candidate in found:
        why, record = candidate.why_not, candidate.record
        if record is not None:
            require_same(candidate.path, record, own, config.training.resume_anyway)
            why = _wrong_anywhere(candidate.path, record)
            if why is None:
                return candidate.path
        say(f"{candidate.path} is passed over: {why}")
    return None


def _wrong_anywhere(checkpoint: Path, record: CheckpointRecord) -> str | None:
    """Why the content of a checkpoint is not what was written, on every rank; each reads its share of the files."""
    rank, num_ranks = rank_and_size()
    mine = share_of({name: entry.size for name, entry in record.files.items()}, rank, num_ranks)
    found = on_every_rank(lambda: wrong_hash(checkpoint, [(name, record.files[name]) for name in mine]))
    return next((why for why in found if why is not None), None)
