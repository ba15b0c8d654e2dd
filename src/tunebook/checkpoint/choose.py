"""Which checkpoint a run resumes from: the newest that is complete, of this run, and verified by every hash.

The run's own checkpoints come first, then those that `training.resume` names. The launcher finds the expected one
without reading files and without torch, so that it can refuse before anything starts. The ranks divide the files to
hash among them. Every skipped checkpoint is reported with the reason.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from tunebook.checkpoint.collectives import on_every_rank, on_first_rank, rank_and_size, share_of
from tunebook.checkpoint.identity import require_same
from tunebook.checkpoint.record import CHECKPOINTS_FOLDER, RECORD_FILE, CheckpointRecord, Identity
from tunebook.checkpoint.save import clean_up
from tunebook.checkpoint.verify import Candidate, candidates_in, examine, wrong_hash
from tunebook.config.book import resolve_path
from tunebook.config.choices import RESUME_WORDS
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, RequestError

Check = Callable[[Path, CheckpointRecord], str | None]  # why a complete checkpoint is damaged


def expected_checkpoint(config: RunConfig, run: Path | None, identity: Identity) -> Path | None:
    """The checkpoint that the ranks will resume from unless its content is damaged; None to start at the beginning.

    Raises: RequestError for a checkpoint of another run, or a named folder without one; DataError for a named
    checkpoint that is damaged.
    """
    return _first_sound(config, run, identity, check=lambda path, record: None, report=lambda line: None)


def choose_checkpoint(config: RunConfig, run: Path, identity: Identity, report: Callable[[str], None]) -> Path | None:
    """The verified checkpoint that the ranks resume from; None to start at the beginning.

    A collective; `report` is called on every rank. Raises: as `expected_checkpoint`.
    """
    checkpoints = run / CHECKPOINTS_FOLDER

    def check(checkpoint: Path, record: CheckpointRecord) -> str | None:
        problem = _wrong_anywhere(checkpoint, record)
        if problem is not None and checkpoint.parent == checkpoints:  # or it would count as one of the newest that stay
            on_first_rank(lambda: checkpoint.rename(checkpoints / f"damaged-{checkpoint.name}"))
        return problem

    on_first_rank(lambda: clean_up(checkpoints))
    return _first_sound(config, run, identity, check, report)


def _first_sound(
    config: RunConfig, run: Path | None, identity: Identity, check: Check, report: Callable[[str], None]
) -> Path | None:
    """The first checkpoint that is complete and passes `check`: of the run's own, then of the named ones."""
    named, reasons = resume_folder(config), []
    of_run = on_first_rank(lambda: candidates_in(run / CHECKPOINTS_FOLDER)) if run is not None else []
    for candidate in _then_named(of_run, named):
        problem = candidate.problem
        if candidate.record is not None:
            require_same(candidate.path, candidate.record, identity, config.training.resume_anyway)
            problem = check(candidate.path, candidate.record)
            if problem is None:
                return candidate.path
        reasons.append(f"{candidate.path} is passed over: {problem}")
        report(reasons[-1])
    if named is None:
        return None
    raise DataError(
        f"training.resume={named} holds no complete checkpoint: {'; '.join(reasons)}; name another checkpoint, restore "
        "this one from a copy, or start again with training.resume=never",
        problem_id="checkpoint-damaged",
    )


def _then_named(of_run: list[Candidate], named: Path | None) -> Iterator[Candidate]:
    """The named folder is read only if no checkpoint of the run is sound."""
    yield from of_run
    if named is not None:
        yield from on_first_rank(lambda: named_candidates(named))


def resume_folder(config: RunConfig) -> Path | None:
    """The folder that `training.resume` names; None for one of its keywords."""
    resume = config.training.resume
    return None if resume in RESUME_WORDS else resolve_path(resume)


def same_command(config: RunConfig, option: str = "") -> str:
    """The hint for resuming a stopped run or sweep: with `never` the same command would start a new one.

    `option` is an option that the command also needs.
    """
    without = " without training.resume=never" if config.training.resume == "never" else ""
    return f"the same command{f' with {option}' if option else ''}{without}"


def named_candidates(named: Path) -> list[Candidate]:
    """The checkpoints of a folder that the user named, itself one or a run's; newest first.

    Raises: RequestError for a folder that is neither, and for checkpoints of other programs.
    """
    named = named.resolve()
    candidates = candidates_in(named / CHECKPOINTS_FOLDER) or candidates_in(named) or [examine(named)]
    if not any((candidate.path / RECORD_FILE).is_file() for candidate in candidates):
        problem = candidates[0].problem if named.is_dir() else f"there is no such folder on {socket.gethostname()}"
        raise RequestError(
            f"training.resume={named} is no checkpoint to resume from: {problem}; name a run folder, or a folder "
            f"checkpoint-<step> in its checkpoints; to start from other weights: model={named}",
            problem_id="checkpoint-not-usable",
        )
    return candidates


def require_verified(checkpoint: Path) -> None:
    """Refuse a damaged best checkpoint; each rank reads a share of it. Raises: DataError."""
    candidate = on_first_rank(lambda: examine(checkpoint))
    problem = candidate.problem if candidate.record is None else _wrong_anywhere(checkpoint, candidate.record)
    if problem is not None:
        raise DataError(
            f"{checkpoint} cannot be loaded: {problem}. It is the best one, so no other replaces it. "
            "Restore it from a copy and type the same command again; or remove it and use the best of the others: "
            "'training.resume_anyway=[best]'",
            problem_id="checkpoint-damaged",
        )


def _wrong_anywhere(checkpoint: Path, record: CheckpointRecord) -> str | None:
    """Why a checkpoint is damaged, on every rank; each rank reads its share of the files."""
    own_share = share_of({name: entry.size for name, entry in record.files.items()}, *rank_and_size())
    reasons = on_every_rank(lambda: wrong_hash(checkpoint, [(name, record.files[name]) for name in own_share]))
    return next((problem for problem in reasons if problem is not None), None)
