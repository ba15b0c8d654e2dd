"""Which folder of a run is exported: the one that is named, the trained model, or the newest complete checkpoint.

A checkpoint is taken only after every hash in its record holds, so it is not damaged, and its pickles run no code; the
model only if its weights are those that the run's manifest records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunebook.checkpoint.newest import newest_checkpoint, passed_over
from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    CheckpointRecord,
    checkpoint_path,
    named_as_checkpoints,
    step_of,
)
from tunebook.checkpoint.verify import MODEL_FOLDER, require_unchanged_model, verified_record
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
    """What to export of a run. Raises: RequestError for nothing there, DataError for a checkpoint that is damaged."""
    if checkpoint is None:
        model = run.folder / MODEL_FOLDER
        if holds_model(model):
            return _model(run, model)
        newest = newest_checkpoint(run.folder)
        if newest is None:
            raise _nothing_in(run.folder)
        return _checkpoint(newest)
    folder = _named(run.folder, checkpoint)
    if folder == run.folder / MODEL_FOLDER:
        return _model(run, folder)
    return _checkpoint(folder)


def _model(run: RunRecord, folder: Path) -> Source:
    require_unchanged_model(run.folder, by_hash=True)
    return Source(folder=folder, step=run.model_step, record=None)


def _checkpoint(folder: Path) -> Source:
    return Source(folder=folder, step=step_of(folder), record=verified_record(folder))


def _named(run: Path, text: str) -> Path:
    """The folder that --checkpoint means: a step's, or a path's inside of the run."""
    checkpoints = run / CHECKPOINTS_FOLDER
    if text.isdecimal():
        folder = checkpoint_path(checkpoints, int(text))
        if folder.is_dir():
            return folder
        raise _no_checkpoint(run, f"--checkpoint {text}: there is no {folder}")
    folder = Path(text).expanduser().absolute()
    if not folder.is_dir():
        folder = checkpoints / text  # its bare name
    if not folder.is_dir():
        raise _no_checkpoint(run, f"--checkpoint {text} is neither a step nor a folder")
    folder = folder.resolve()
    is_checkpoint = folder.parent == checkpoints.resolve() and step_of(folder) is not None
    if is_checkpoint or folder == run / MODEL_FOLDER:
        return folder
    raise _no_checkpoint(
        run, f"--checkpoint {text}: {folder} is no checkpoint of {run}, whose settings it would be exported with"
    )


def _no_checkpoint(run: Path, what: str) -> RequestError:
    found = [str(step_of(path)) for path in named_as_checkpoints(run / CHECKPOINTS_FOLDER)]
    steps = f"its checkpoints are of the steps {', '.join(reversed(found))}" if found else "it has no checkpoints"
    return RequestError(
        f"{what}; {steps}. Name a step, such as --checkpoint {found[0] if found else 100}, or leave it out for the "
        "newest",
        problem_id="export-no-checkpoint",
    )


def _nothing_in(run: Path) -> RequestError:
    skipped = [f"{path.name}: {why}" for path, why in passed_over(run).items()]
    why = f" ({'; '.join(skipped)})" if skipped else ""
    return RequestError(
        f"{run} has neither a {MODEL_FOLDER}/ folder nor a complete checkpoint{why}, so there is nothing to export; go "
        "on with the run until it has saved: training.save_every_steps says how often",
        problem_id="export-no-checkpoint",
    )
