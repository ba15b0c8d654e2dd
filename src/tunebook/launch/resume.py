"""Which run folder a run goes on in: `training.resume=auto` takes up an unfinished run of the same configuration."""

from __future__ import annotations

from pathlib import Path

from tunebook.config.schema import RunConfig
from tunebook.errors import DataError
from tunebook.record.config_hash import config_hash
from tunebook.record.manifest import RunState, read_manifest
from tunebook.record.run_folder import find_runs

# A run that says `running` may be just that, on another machine; one that was invalid would end the same way again.
_UNFINISHED = (RunState.stopped.name, RunState.failed.name)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest step that was written to its end (the trainer's state is written last)."""
    found = [path.parent for path in (folder / "checkpoints").glob("checkpoint-*/trainer_state.json")]
    return max(found, key=lambda path: int(path.name.split("-")[1])) if found else None


def unfinished_run(config: RunConfig) -> Path | None:
    """The newest run of a resolved configuration that ended early with a checkpoint to go on from; None if not asked.

    The configuration's hash must be the same: another seed, batch or learning rate is another run.
    """
    if config.training.resume != "auto":
        return None
    wanted = config_hash(config)
    for folder in reversed(find_runs(Path(config.outputs), config.recipe or "custom")):
        try:
            manifest = read_manifest(folder)
        except DataError:
            continue  # a damaged record of another run must not stop this one
        if manifest["config_sha256"] != wanted:
            continue
        # The newest of the same configuration decides: after it has finished there is nothing to go on with.
        is_unfinished = manifest["status"]["state"] in _UNFINISHED
        return folder if is_unfinished and newest_checkpoint(folder) is not None else None
    return None


def checkpoint_to_load(config: RunConfig, folder: Path) -> Path | None:
    """Where a rank goes on from: the run's own newest checkpoint, else the one that `training.resume` names."""
    own = newest_checkpoint(folder)
    if own is not None or config.training.resume in ("auto", "never"):
        return own
    named = Path(config.training.resume).expanduser().absolute()
    return newest_checkpoint(named) or named
