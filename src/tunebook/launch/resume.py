"""Choose the run folder that a run resumes: an unfinished one of the same configuration, unless training.resume=never.

If `training.resume` names a folder, the run resumes a run that started from that folder, and its own checkpoints take
precedence. A run can be resumed if it stopped, failed or was killed after a checkpoint. It can also be resumed after
training has finished: then only its evaluation remains.

Two runs are the same if their configuration hashes match; the memory found on the machine does not count. A run that
differs only in what `auto` decided, or in the machine, is another run. A message then says what differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from typing import Any

from tunebook.checkpoint.choose import named_by
from tunebook.checkpoint.verify import newest_checkpoint, passed_over
from tunebook.config.choices import ResumeAnyway
from tunebook.config.frozen import load_config
from tunebook.config.identity import config_hash
from tunebook.config.override_text import as_typed, typed
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DataError, RequestError
from tunebook.record.manifest import MANIFEST_FILE, RunState, read_manifest
from tunebook.record.run_folder import (
    LOCK_FILE,
    RUN_FILE,
    WITHOUT_RECIPE,
    find_runs,
    is_run,
    is_worked_in,
    read_outcomes,
)

# An invalid run would end the same way again.
_UNFINISHED = (RunState.stopped.name, RunState.failed.name)


def unfinished_run(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the newest unfinished run of a resolved configuration to resume; None if there is none, or resume=never.

    The configuration hash must match: another seed, batch or learning rate is another run. If `training.resume` names a
    folder, a run that started elsewhere is another run, too. `say` gets the reason when an unfinished run is not
    resumed because none of its checkpoints is complete, or because only what `auto` decided or the machine differs.
    """
    if config.training.resume == "never":
        return None

    wanted, is_newest = config_hash(config), True
    for folder in reversed(find_runs(Path(config.outputs), config.recipe or WITHOUT_RECIPE)):
        try:
            manifest = _read_manifest(folder)
        except DataError:
            continue  # a damaged record of another run must not stop this one
        sha256, has_ended = str(manifest["config_sha256"]), not _is_unfinished(folder, manifest)
        if has_ended and sha256 != wanted:
            continue
        if sha256 != wanted or not has_same_start(config, folder):
            if is_newest and config.training.resume == "auto" and (why := difference(config, folder, sha256)):
                say(f"not resuming {folder}, which ended early: {why}; to resume it: {typed(_RESUME, str(folder))}")
            is_newest = False
            continue
        if has_ended:  # the newest run of this configuration decides: if it has finished, there is nothing to resume
            return None
        if _has_progress(folder, config):
            return folder
        for checkpoint, why in passed_over(folder).items():
            say(f"not resuming from {checkpoint}: {why}")
        return None
    return None


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest after checking the keys used here. Raises: DataError if it is damaged."""
    manifest = read_manifest(folder)
    status = manifest.get("status")
    if not isinstance(status, dict) or "state" not in status or "config_sha256" not in manifest:
        raise DataError(
            f"{folder / MANIFEST_FILE} is no whole manifest: it has no state or no config_sha256; restore it from a "
            "copy, or name another folder",
            problem_id="broken-record",
        )
    return manifest


def check_run_folder(config: RunConfig, folder: Path) -> None:
    """Check that a run can start or resume in a folder that the user named. Raises: RequestError if it cannot."""
    if not folder.exists() or (folder.is_dir() and all(path.name == LOCK_FILE for path in folder.iterdir())):
        return
    if reason := _why_taken(config, folder):
        raise RequestError(
            f"--run-folder {folder}: {reason}; name a folder that is new or empty", problem_id="run-folder-taken"
        )


def _why_taken(config: RunConfig, folder: Path) -> str | None:
    if not folder.is_dir():
        return "this is a file"
    if not is_run(folder):
        return "it holds other files and no run"
    if not (folder / MANIFEST_FILE).is_file():
        return None  # ended during set-up
    manifest = _read_manifest(folder)
    state = manifest["status"]["state"]
    if config.training.resume == "never":
        return f"it holds a run ({state}), and training.resume=never forbids resuming it"
    sha256 = str(manifest["config_sha256"])
    if sha256 != config_hash(config):
        why = difference(config, folder, sha256)
        return f"it holds a run ({state}) of another configuration, {folder / 'run.yaml'}{f' ({why})' if why else ''}"
    if state == RunState.finished.name:
        return "its run has finished (evaluate it again with: tunebook eval)"
    if state == RunState.invalid.name:
        return "its run ended with a loss that is not finite, and would again"
    return None if _is_unfinished(folder, manifest) else "a run is active in it"


def _is_unfinished(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether a run ended early. State `running` counts if no process here holds the folder.

    Such a run was killed, or it runs on another machine.
    """
    state = manifest["status"]["state"]
    return state in _UNFINISHED or (state == RunState.running.name and not is_worked_in(folder))


def _has_progress(folder: Path, config: RunConfig) -> bool:
    return newest_checkpoint(folder) is not None or is_trained(folder, config)


def is_trained(folder: Path, config: RunConfig) -> bool:
    """Whether every rank has finished training, so that only the evaluation remains."""
    return (folder / "model").is_dir() and read_outcomes(folder, world_size(config)).exit_code == 0


_RESUME = "training.resume"
# What another machine, or a better estimate of `auto`, changes without the user.
_MAY_DIFFER = (
    *("hardware.generation", "hardware.num_nodes", "hardware.gpus_per_node"),
    *("activation.checkpointing", "packing.row_length", "training.micro_batch_size"),
)


def has_same_start(config: RunConfig, folder: Path) -> bool:
    """Whether the run in a folder started where `training.resume` says; otherwise its losses differ."""
    named = named_by(config)
    if named is None:
        return True
    theirs = _recorded_config(folder)
    begun = named_by(theirs) if theirs is not None else None
    if theirs is None or begun is None or begun.resolve() != named.resolve():
        return False
    # `best` allows missing checkpoints; it does not change where a run started.
    return not (set(theirs.training.resume_anyway) ^ set(config.training.resume_anyway)) - {ResumeAnyway.best}


def difference(config: RunConfig, folder: Path, sha256: str) -> str | None:
    """Say how an earlier run differs if only the machine or what `auto` decides does; None for any other run.

    The strategy may differ with the machine.
    """
    theirs = _recorded_config(folder)
    if theirs is None or config_hash(_with_values_of(config, theirs, (*_MAY_DIFFER, "parallelism"))) != sha256:
        return None
    changed = _changed_keys(theirs, config, _MAY_DIFFER)
    if not changed:
        return None
    changed += _changed_keys(theirs, config, ["parallelism.strategy"])
    changes = [f"{key} was {as_typed(_plain(theirs, key))} and is {as_typed(_plain(config, key))}" for key in changed]
    return ", ".join(changes)


def _recorded_config(folder: Path) -> RunConfig | None:
    try:
        return load_config(folder / RUN_FILE)
    except RequestError:
        return None


def _with_values_of(config: RunConfig, theirs: RunConfig, keys: Collection[str]) -> RunConfig:
    """Return a copy of a configuration with some values taken from another."""
    own = copy.deepcopy(config)
    for key in keys:
        *sections, name = key.split(".")
        setattr(_value(own, sections), name, _value(theirs, [*sections, name]))
    return own


def _changed_keys(theirs: RunConfig, config: RunConfig, keys: Collection[str]) -> list[str]:
    return [key for key in keys if _plain(theirs, key) != _plain(config, key)]


def _plain(config: RunConfig, key: str) -> object:
    value = _value(config, key.split("."))
    return value.name if isinstance(value, Enum) else value


def _value(config: RunConfig, path: list[str]) -> Any:
    node: Any = config
    for name in path:
        node = getattr(node, name)
    return node
