"""Find the checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path

from tunebook.config.schema import RunConfig


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest step that was written to its end (the trainer's state is written last)."""
    found = [path.parent for path in (folder / "checkpoints").glob("checkpoint-*/trainer_state.json")]
    return max(found, key=lambda path: int(path.name.split("-")[1])) if found else None


def checkpoint_to_load(config: RunConfig, folder: Path) -> Path | None:
    """Where a rank goes on from: the run's own newest checkpoint, else the one that `training.resume` names."""
    own = newest_checkpoint(folder)
    if own is not None or config.training.resume in ("auto", "never"):
        return own
    named = Path(config.training.resume).expanduser().absolute()
    return newest_checkpoint(named) or named
