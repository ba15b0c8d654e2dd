"""Which checkpoints go once a new one is complete, and how: never so that a half-deleted one looks like a whole one."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from tunebook.checkpoint.newest import complete_checkpoints
from tunebook.checkpoint.record import (
    PENDING_FILE,
    RECORD_FILE,
    UNFINISHED_FOLDER,
    named_as_checkpoints,
    step_of,
)


def steps_to_remove(
    complete: Collection[int], *, newest: int, keep: int, best: int | None, distrusted: Collection[int] = ()
) -> list[int]:
    """Of the steps of complete checkpoints, those that are not among the newest `keep`, nor the best.

    `newest` was just completed and always stays. Those that are `distrusted` count for nothing and go.
    """
    trusted = (set(complete) - set(distrusted)) | {newest}
    kept = set(sorted(trusted, reverse=True)[: max(1, keep)]) | {newest}
    if best in trusted:
        kept.add(best)
    return sorted(set(complete) - kept)


def remove_old(checkpoints: Path, *, newest: int, keep: int, best: int | None, trusts: Callable[[int], bool]) -> None:
    """Delete what `steps_to_remove` names, in a folder whose checkpoint `newest` is complete.

    What cannot be deleted stays: that is no reason to lose a run. Folders without a record are left alone: they are
    not this Tunebook's.
    """
    by_step = {step_of(path) or 0: path for path in complete_checkpoints(checkpoints)}
    if newest not in by_step:
        return  # never the last complete one
    distrusted = [step for step in by_step if not trusts(step)]
    for step in steps_to_remove(by_step, newest=newest, keep=keep, best=best, distrusted=distrusted):
        remove_checkpoint(by_step[step])


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete one checkpoint: it is taken out of sight in one step, and then bit by bit. OSErrors leave it as it is."""
    aside = checkpoint.parent / UNFINISHED_FOLDER / f"removed-{checkpoint.name}-{secrets.token_hex(4)}"
    with suppress(OSError):
        aside.parent.mkdir(exist_ok=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.rmdir()


def clean_up(checkpoints: Path) -> None:
    """Remove what an interrupted save, or an interrupted deletion, has left behind. For one process at a time."""
    shutil.rmtree(checkpoints / UNFINISHED_FOLDER, ignore_errors=True)
    for checkpoint in named_as_checkpoints(checkpoints):
        if (checkpoint / PENDING_FILE).is_file() and not (checkpoint / RECORD_FILE).exists():
            remove_checkpoint(checkpoint)
