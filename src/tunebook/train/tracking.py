"""The trackers' settings that have no argument: one curve per run folder, over all attempts of the run.

TensorBoard and trackio continue a run by its folder and its name. wandb needs an id for that, which the manifest keeps.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from tunebook.config.choices import TrackerName
from tunebook.config.schema import TrackingConfig
from tunebook.record.manifest import MANIFEST_FILE, WANDB_RUN_ID, read_manifest, update_manifest

_PROJECT, _FOLDER, _ID, _RESUME = "WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"


def set_up_tracking(tracking: TrackingConfig, folder: Path, *, is_first_rank: bool, say: Callable[[str], None]) -> None:
    """Set the variables that the tracker of a run reads. The first rank alone writes and speaks.

    What the user has set stands, but for wandb's project, which is a key of the configuration.
    """
    wandb_run_id = None
    if tracking.name is TrackerName.wandb and is_first_rank:
        wandb_run_id = _run_id(folder)
        said = os.environ.get(_PROJECT, tracking.project)
        if said != tracking.project:
            say(f"{_PROJECT}={said} is not used: the project is tracking.project={tracking.project}, where it is typed")
    os.environ.update(tracker_environment(tracking, folder, os.environ, wandb_run_id))


def tracker_environment(
    tracking: TrackingConfig, folder: Path, given: Mapping[str, str], wandb_run_id: str | None = None
) -> dict[str, str]:
    """What the trackers read from the environment instead of the arguments; `given` is what it holds."""
    if tracking.name is TrackerName.tensorboard:
        return {"TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard")}
    if tracking.name is not TrackerName.wandb:
        return {}
    variables = {_PROJECT: tracking.project, _FOLDER: given.get(_FOLDER, str(folder))}
    if wandb_run_id is not None:
        variables |= {_ID: wandb_run_id, _RESUME: given.get(_RESUME, "allow")}
    return variables


def _run_id(folder: Path) -> str:
    """The user's id, or that of the run's attempts before, or a new one; the manifest has it for the next attempt."""
    has_manifest = (folder / MANIFEST_FILE).is_file()
    recorded = read_manifest(folder).get(WANDB_RUN_ID) if has_manifest else None
    run_id = os.environ.get(_ID) or recorded or f"tunebook-{secrets.token_hex(8)}"
    if has_manifest and run_id != recorded:
        update_manifest(folder, {WANDB_RUN_ID: run_id})
    return run_id
