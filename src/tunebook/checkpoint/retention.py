"""Disk space of checkpoints: check the space for the next one, and delete old ones once it is complete.

A half-deleted checkpoint never looks like a complete one.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.checkpoint.record import (
    PENDING_FILE,
    RECORD_FILE,
    UNFINISHED_FOLDER,
    named_as_checkpoints,
    step_of,
)
from tunebook.checkpoint.verify import complete_checkpoints


def steps_to_remove(
    complete: Collection[int], *, newest: int, keep: int, best: int | None, distrusted: Collection[int] = ()
) -> list[int]:
    """The steps of complete checkpoints to delete: all but the newest `keep` and the best.

    `newest` was just completed and always stays. `distrusted` checkpoints do not count and are deleted.
    """
    trusted = (set(complete) - set(distrusted)) | {newest}
    kept = set(sorted(trusted, reverse=True)[: max(1, keep)]) | {newest}
    if best in trusted:
        kept.add(best)
    return sorted(set(complete) - kept)


def remove_old(checkpoints: Path, *, newest: int, keep: int, best: int | None, trusts: Callable[[int], bool]) -> None:
    """Delete what `steps_to_remove` names, in a folder whose checkpoint `newest` is complete.

    A checkpoint that cannot be deleted stays: the run continues. Folders without a record were not written by this
    version of Tunebook and stay too.
    """
    by_step = {step_of(path) or 0: path for path in complete_checkpoints(checkpoints)}
    if newest not in by_step:
        return  # never the last complete one
    distrusted = [step for step in by_step if not trusts(step)]
    for step in steps_to_remove(by_step, newest=newest, keep=keep, best=best, distrusted=distrusted):
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


def estimate_bytes(model: Any) -> float:
    """A lower bound for the first checkpoint of a run: the saved weights, of an adapter those that are trained."""
    is_adapter, total = hasattr(model, "peft_config"), 0.0
    for parameter in model.parameters():
        if parameter.requires_grad or not is_adapter:
            count = getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3 a rank holds a part
            total += count * parameter.element_size()
    return total


def require_writable(folder: Path) -> None:
    """Write a file and remove it, since an existing folder may be read-only. Raises: OSError."""
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
