"""Which checkpoints of a run are complete, told without reading their files: by record and sizes. Cheap.

Before one is loaded its hashes are verified besides (`checkpoint.verify`): a changed file may have the size of the old.
"""

from __future__ import annotations

from pathlib import Path

from tunebook.checkpoint.record import CHECKPOINTS_FOLDER, named_as_checkpoints
from tunebook.checkpoint.verify import why_not_complete


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder is a complete checkpoint: its record is there and every file has its size."""
    return why_not_complete(checkpoint) is None


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    return next(filter(is_complete, named_as_checkpoints(run / CHECKPOINTS_FOLDER)), None)


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Every complete checkpoint of a folder of checkpoints, newest first."""
    return [path for path in named_as_checkpoints(checkpoints) if is_complete(path)]


def passed_over(run: Path) -> dict[Path, str]:
    """The checkpoints of a run that are newer than its newest complete one, and why each is none."""
    found: dict[Path, str] = {}
    for path in named_as_checkpoints(run / CHECKPOINTS_FOLDER):
        why = why_not_complete(path)
        if why is None:
            break
        found[path] = why
    return found
