"""Choose the run folder that a run resumes: an unfinished one of the same configuration, unless training.resume=never.

If `training.resume` names a folder, the run resumes a run that started from that folder, and its own checkpoints take
precedence. A run can be resumed if it stopped, failed or was killed after a checkpoint. It can also be resumed after
training has finished: then only its evaluation remains.

Two runs are the same if their settings are equal; the memory found on the machine does not count. A run that differs
in what `auto` decided, or in the machine, is another run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.checkpoint.choose import resume_folder
from tunebook.checkpoint.verify import newest_checkpoint, skipped_checkpoints
from tunebook.config.choices import ResumeAnyway
from tunebook.config.frozen import load_config
from tunebook.config.identity import changed_settings, result_settings
from tunebook.config.override_text import as_typed, typed
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DataError, RequestError, first_few
from tunebook.record.manifest import MANIFEST_FILE, RunState, read_manifest
from tunebook.record.run_folder import (
    LOCK_FILE,
    RUN_FILE,
    find_runs,
    is_run,
    is_worked_in,
    read_outcomes,
    run_name,
)

# An invalid run would end the same way again.
_UNFINISHED = (RunState.stopped.name, RunState.failed.name)


def unfinished_run(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the newest unfinished run of a resolved configuration to resume; None if there is none, or resume=never.

    The settings must be equal: another seed, batch or learning rate is another run. If `training.resume` names a
    folder, a run that started elsewhere is another run, too. `say` gets the reason why the newest unfinished run is not
    resumed: none of its checkpoints is complete, or what differs.
    """
    if config.training.resume == "never":
        return None
    is_newest = True
    for folder in reversed(find_runs(Path(config.outputs), run_name(config))):
        try:
            is_unfinished, theirs = _is_unfinished(folder), load_config(folder / RUN_FILE)
        except (DataError, RequestError):
            continue  # a damaged record of another run must not stop this one
        differing = _differences(config, theirs)
        if not differing and _has_same_start(config, theirs):
            # The newest run of this configuration decides: if it has finished, there is nothing to resume.
            if is_unfinished and (newest_checkpoint(folder) is not None or is_trained(folder, config)):
                return folder
            for checkpoint, problem in skipped_checkpoints(folder).items() if is_unfinished else ():
                say(f"not resuming from {checkpoint}: {problem}")
            return None
        if is_unfinished and is_newest and config.training.resume == "auto":
            changes = [f"{key} was {as_typed(before)} and is {as_typed(now)}" for key, before, now in differing]
            resume = typed("training.resume", str(folder))
            if theirs.model.run is not None and theirs.model.run != config.model.run:
                resume = f"{typed('model.run', theirs.model.run)} {resume}"
            say(f"not resuming {folder}, which ended early: {first_few(changes, 3)}; to resume it: {resume}")
        is_newest = is_newest and not is_unfinished
    return None


def check_run_folder(config: RunConfig, folder: Path) -> None:
    """Check that a run can start or resume in a folder that the user named. Raises: RequestError if it cannot."""
    if not folder.exists() or (folder.is_dir() and all(path.name == LOCK_FILE for path in folder.iterdir())):
        return
    if reason := _folder_conflict(config, folder):
        raise RequestError(
            f"--run-folder {folder}: {reason}; name a folder that is new or empty", problem_id="run-folder-taken"
        )


def _folder_conflict(config: RunConfig, folder: Path) -> str | None:
    if not is_run(folder):
        return "it holds other files and no run"
    if not (folder / MANIFEST_FILE).is_file():
        return None  # ended during set-up
    state = read_manifest(folder)["status"]["state"]
    if config.training.resume == "never":
        return f"it holds a run ({state}), and training.resume=never forbids resuming it"
    if differing := _differences(config, load_config(folder / RUN_FILE)):
        keys = ", ".join(key for key, _, _ in differing[:3])
        return f"it holds a run ({state}) of another configuration, {folder / RUN_FILE} (see {keys})"
    if state in (RunState.finished.name, RunState.invalid.name):
        return f"its run is {state}; to evaluate it: tunebook eval run={folder}"
    return None


def is_trained(folder: Path, config: RunConfig) -> bool:
    """Whether every rank has finished training, so that only the evaluation remains."""
    return (folder / "model").is_dir() and read_outcomes(folder, world_size(config)).exit_code == 0


def _is_unfinished(folder: Path) -> bool:
    """Whether a run ended early. State `running` counts if no process here holds the folder.

    Such a run was killed, or it runs on another machine.
    """
    state = read_manifest(folder)["status"]["state"]
    return state in _UNFINISHED or (state == RunState.running.name and not is_worked_in(folder))


def _differences(config: RunConfig, theirs: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return the settings of two runs that differ, theirs first; detected memory does not count."""
    return changed_settings(result_settings(theirs), result_settings(config))


def _has_same_start(config: RunConfig, theirs: RunConfig) -> bool:
    """Whether their run started where `training.resume` says; otherwise its losses differ."""
    named, begun = resume_folder(config), resume_folder(theirs)
    if named is None:
        return True
    if begun is None or begun.resolve() != named.resolve():
        return False
    # `best` allows missing checkpoints; it does not change where a run started.
    return not (set(theirs.training.resume_anyway) ^ set(config.training.resume_anyway)) - {ResumeAnyway.best}
