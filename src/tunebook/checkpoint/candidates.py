"""The checkpoints that a run could go on from: its own, or those that `training.resume` names.

Cheap and without torch, so that the launcher can refuse what cannot be gone on from before anything starts. Hashes are
left to the ranks (`checkpoint.choose`), which share them out.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from tunebook.checkpoint.identity import require_same
from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    RECORD_FILE,
    CheckpointRecord,
    Identity,
    NewerRecordError,
    UnreadableRecordError,
    named_as_checkpoints,
    read_record,
    step_of,
)
from tunebook.checkpoint.verify import difference_of_files
from tunebook.config.book import resolve_path
from tunebook.config.choices import RESUME_WORDS
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, RequestError

_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".distcp")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A folder `checkpoint-<step>`: its record, or why it is passed over."""

    path: Path
    record: CheckpointRecord | None
    why_not: str | None = None


def expected_checkpoint(config: RunConfig, run: Path | None, own: Identity) -> Path | None:
    """The checkpoint that the ranks will go on from unless its content turns out to be damaged; None for none.

    Raises: RequestError for one of another run or a later version, or for a named folder that is none; DataError for a
    named one that is damaged.
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
    """The folder that `training.resume` names; None for a word."""
    word = config.training.resume
    return None if word in RESUME_WORDS else resolve_path(word)


def same_command(config: RunConfig, option: str = "") -> str:
    """What goes on with a run, or a sweep, that was stopped: under `never` the same words would begin another.

    `option` is one that has to be typed too.
    """
    typed = f" with {option}" if option else ""
    return f"the same command{typed}{' without training.resume=never' if config.training.resume == 'never' else ''}"


def candidates_in(checkpoints: Path) -> list[Candidate]:
    """Every folder named as a checkpoint, newest first, with its files compared by name and size.

    Raises: RequestError for one that a later version wrote: to go back before it would lose what it holds.
    """
    return [_candidate(path) for path in named_as_checkpoints(checkpoints)]


def named_candidates(named: Path) -> list[Candidate]:
    """The checkpoints that a folder named by the user means: itself, or those of a run; newest first.

    Raises: RequestError for a folder that is neither, and for checkpoints that are not by this Tunebook.
    """
    named = named.resolve()
    found = candidates_in(named / CHECKPOINTS_FOLDER) or candidates_in(named) or [_candidate(named)]
    if not any((candidate.path / RECORD_FILE).is_file() for candidate in found):
        raise RequestError(
            f"training.resume={named} cannot be gone on from: {_why_refused(found[0])}",
            problem_id="checkpoint-not-usable",
        )
    return found


def damaged(named: Path, found: list[Candidate], why: str) -> DataError:
    """The error for a folder named by the user all of whose checkpoints are damaged."""
    which = "its checkpoint is damaged" if len(found) == 1 else f"none of its {len(found)} checkpoints is whole"
    return DataError(
        f"training.resume={named}: {which}: {why}; name another checkpoint, restore this one from a copy, or start "
        "anew with training.resume=never",
        problem_id="checkpoint-damaged",
    )


def _candidate(path: Path) -> Candidate:
    try:
        record = read_record(path)
        why = difference_of_files(path, record)
        if step_of(path) not in (None, record.step):
            why = f"its record is of step {record.step}"
        return Candidate(path=path, record=None if why else record, why_not=why)
    except NewerRecordError as error:
        raise RequestError(f"{path}: {error}", problem_id="checkpoint-of-newer-version") from error
    except UnreadableRecordError as error:
        return Candidate(path=path, record=None, why_not=str(error))
    except OSError as error:
        return Candidate(path=path, record=None, why_not=f"it cannot be read ({error.strerror})")


def _why_refused(candidate: Candidate) -> str:
    """Why a folder is no checkpoint of ours, and what to do with what it is."""
    if not candidate.path.is_dir():
        return (
            f"there is no such folder on {socket.gethostname()}; name one that every node sees, in a container by its "
            "own path or one that launcher.container_mounts has"
        )
    names = sorted(path.name for path in candidate.path.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES) or name.startswith("global_step")]
    weights = [name for name in names if name.endswith(".safetensors")]
    from_weights = f"to start from its weights, with a new optimizer: model.path={candidate.path}"
    if pickles:
        advice = f"{pickles[0]} in it is a pickle, which runs code when it is loaded, and no record vouches for it"
        advice += f"; {from_weights}" if weights else ""
    elif weights:
        advice = f"it holds weights and no state of an optimizer; {from_weights}"
    else:
        advice = "name a run folder, or a folder checkpoint-<step> in its checkpoints"
    return f"{candidate.path.name}: {candidate.why_not}; {advice}"
