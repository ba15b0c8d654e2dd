"""Which folder of a run is exported: the one that is named, the trained model, or the newest complete checkpoint.

Every hash in a checkpoint's record is verified first, and the trained model's weights against the run's manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    CheckpointRecord,
    named_as_checkpoints,
    step_of,
)
from tunebook.checkpoint.verify import (
    MODEL_FOLDER,
    newest_checkpoint,
    passed_over,
    require_unchanged_model,
    verified_record,
)
from tunebook.errors import RequestError
from tunebook.model.adapters import holds_model
from tunebook.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder of a run with weights."""

    folder: Path
    step: int | None  # optimizer steps that the weights have seen
    record: CheckpointRecord | None  # of a checkpoint

    def name_in(self, run: Path) -> str:
        """`model` or `checkpoints/checkpoint-<step>`."""
        return self.folder.relative_to(run).as_posix()


def choose_source(run: RunRecord, checkpoint: str | None) -> Source:
    """What to export of a run. Raises: RequestError if there is nothing, DataError for a damaged checkpoint."""
    model = run.folder / MODEL_FOLDER
    if checkpoint is not None:
        folder = _named(run.folder, checkpoint)
    elif holds_model(model):
        folder = model
    elif newest := newest_checkpoint(run.folder):
        folder = newest
    else:
        skipped = "".join(f"; {path.name}: {why}" for path, why in passed_over(run.folder).items())
        raise RequestError(
            f"{run.folder} has neither a {MODEL_FOLDER}/ folder nor a complete checkpoint, so there is nothing to "
            f"export{skipped}; resume the run until it has saved: training.save_every_steps says how often",
            problem_id="export-no-checkpoint",
        )
    if folder == model:
        require_unchanged_model(run.folder, by_hash=True)
        return Source(folder=folder, step=run.model_step, record=None)
    return Source(folder=folder, step=step_of(folder), record=verified_record(folder))


def _named(run: Path, text: str) -> Path:
    """The folder that --checkpoint names, by its step or its name."""
    checkpoints = run / CHECKPOINTS_FOLDER
    folder = checkpoints / (f"checkpoint-{text}" if text.isdecimal() else text)
    found = named_as_checkpoints(checkpoints)
    if folder not in found or folder.is_symlink():
        steps = ", ".join(str(step_of(path)) for path in reversed(found)) or "none"
        raise RequestError(
            f"--checkpoint {text} is no checkpoint of {run}; the steps of its checkpoints: {steps}. Name one, or leave "
            "--checkpoint out for the trained model",
            problem_id="export-no-checkpoint",
        )
    return folder
