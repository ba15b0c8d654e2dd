"""Which checkpoints stay once another is complete. A half-deleted checkpoint never looks like a complete one."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tunebook.checkpoint.record import (
    PENDING_FILE,
    RECORD_FILE,
    UNFINISHED_FOLDER,
    named_as_checkpoints,
    step_of,
)
from tunebook.checkpoint.verify import complete_checkpoints


def steps_to_remove(complete: Collection[int], *, newest: int, keep: int, best: int | None) -> list[int]:
    """The steps of complete checkpoints to delete: all but the newest `keep` and the best.

    `newest` was just completed. Those of later steps are of an attempt that the run went back behind.
    """
    past = [step for step in sorted(complete, reverse=True) if step <= newest]
    kept = {newest, best, *past[: max(1, keep)]}
    return sorted(set(complete) - kept | {step for step in complete if step > newest})


def remove_old(checkpoints: Path, *, newest: int, keep: int, best: int | None) -> None:
    """Delete what `steps_to_remove` names, in a folder whose checkpoint `newest` is complete.

    A checkpoint that cannot be deleted stays: the run continues. Folders without a record were not written by this
    version of Tunebook and stay too.
    """
    by_step = {step_of(path) or 0: path for path in complete_checkpoints(checkpoints)}
    if newest in by_step:  # never the last complete one
        for step in steps_to_remove(by_step, newest=newest, keep=keep, best=best):
            remove_checkpoint(by_step[step])


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete one checkpoint: rename it, then delete its files, so that no half is left. After an OSError it stays."""
    aside = checkpoint.parent / UNFINISHED_FOLDER / f"removed-{checkpoint.name}-{secrets.token_hex(4)}"
    with suppress(OSError):
        aside.parent.mkdir(exist_ok=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.rmdir()


def clean_up(checkpoints: Path) -> None:
    """Remove what an interrupted save or deletion has left behind. For one process at a time."""
    shutil.rmtree(checkpoints / UNFINISHED_FOLDER, ignore_errors=True)
    for checkpoint in named_as_checkpoints(checkpoints):
        if (checkpoint / PENDING_FILE).is_file() and not (checkpoint / RECORD_FILE).exists():
            remove_checkpoint(checkpoint)
