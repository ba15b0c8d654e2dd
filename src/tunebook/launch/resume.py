"""Which run folder a run goes on in: an unfinished one of the same configuration, unless training.resume=never.

Where `training.resume` names a folder, it is one that began there: its own checkpoints come first then.

A run can be gone on with when it stopped, failed or was killed after a checkpoint, or after the training itself: then
only its evaluation is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tunebook.checkpoint.newest import newest_checkpoint, passed_over
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DataError, RequestError
from tunebook.launch.likeness import began_alike, decided_otherwise, is_same_run, on_another_machine
from tunebook.launch.lock import LOCK_FILE, is_worked_in
from tunebook.record.manifest import MANIFEST_FILE, RunState, hash_of_run, read_manifest
from tunebook.record.run_folder import WITHOUT_RECIPE, find_runs, is_run, read_outcomes

# One that was invalid would end the same way again.
_UNFINISHED = (RunState.stopped.name, RunState.failed.name)


def unfinished_run(
    config: RunConfig, say: Callable[[str], None] = lambda text: None, asked: Collection[str] = ()
) -> Path | None:
    """The newest run of a resolved configuration that ended early with a checkpoint to go on from; None if not asked.

    The configuration's hash must be the same: another seed, batch or learning rate is another run; so is, where a
    folder is named to go on from, one that began elsewhere. `asked` are the keys that somebody has set. Said is why one
    is not gone on with that ended early and has checkpoints of which none is complete, or is another run only by what
    `auto` decided or by its machine.
    """
    if config.training.resume == "never":
        return None

    def is_wanted(folder: Path, sha256: str) -> bool:
        return is_same_run(config, folder, sha256, asked) and began_alike(config, folder)

    wanted, ended, is_newest = config_hash(config), list[tuple[Path, str]](), True
    for folder in reversed(find_runs(Path(config.outputs), config.recipe or WITHOUT_RECIPE)):
        try:
            manifest = _read_manifest(folder)
        except DataError:
            continue  # a damaged record of another run must not stop this one
        sha256, has_ended = hash_of_run(folder, manifest), not _is_unfinished(folder, manifest)
        if has_ended and sha256 != wanted:
            ended.append((folder, sha256))  # perhaps with other memory: looked into only where it matters
            continue
        if not is_wanted(folder, sha256):
            if why := _why_another(config, folder, sha256, asked, is_newest=is_newest):
                say(f"not gone on with {folder}, which ended early: {why}")
            is_newest = False
            continue
        # The newest of the same configuration decides: after it has finished there is nothing to go on with.
        if has_ended or any(is_wanted(*newer) for newer in ended):
            return None
        if _has_progress(folder, config):
            return folder
        for checkpoint, why in passed_over(folder).items():
            say(f"not gone on from {checkpoint}: {why}")
        return None
    return None


def _why_another(
    config: RunConfig, folder: Path, sha256: str, asked: Collection[str], *, is_newest: bool
) -> str | None:
    """What is said of a run that ended early and nearly is the one asked for; None for any other."""
    if config.training.resume != "auto":
        return None  # where to go on from was named
    if words := decided_otherwise(config, folder, sha256, asked):
        return f"what was left open is decided otherwise now; to go on with it, add {' '.join(words)}"
    return on_another_machine(config, folder, sha256, asked) if is_newest else None


def _read_manifest(folder: Path) -> dict[str, Any]:
    """A run's manifest with what is decided by here. Raises: DataError for one that is damaged."""
    manifest = read_manifest(folder)
    status = manifest.get("status")
    if not isinstance(status, dict) or "state" not in status or "config_sha256" not in manifest:
        raise DataError(
            f"{folder / MANIFEST_FILE} is no whole manifest: it has no state or no config_sha256; restore it from a "
            "copy, or name another folder",
            problem_id="broken-record",
        )
    return manifest


def check_run_folder(config: RunConfig, folder: Path, asked: Collection[str] = ()) -> None:
    """Whether a run can start, or go on, in a folder that the user named. Raises: RequestError when it cannot."""
    if not folder.exists() or (folder.is_dir() and all(path.name == LOCK_FILE for path in folder.iterdir())):
        return
    if reason := _why_taken(config, folder, asked):
        raise RequestError(
            f"--run-folder {folder}: {reason}; name a folder that is new or empty", problem_id="run-folder-taken"
        )


def _why_taken(config: RunConfig, folder: Path, asked: Collection[str]) -> str | None:
    if not folder.is_dir():
        return "this is a file"
    if not is_run(folder):
        return "it holds other files and no run"
    if not (folder / MANIFEST_FILE).is_file():
        return None  # ended while it was set up
    manifest = _read_manifest(folder)
    state = manifest["status"]["state"]
    if config.training.resume == "never":
        return f"it holds a run ({state}), and training.resume=never says not to go on with one"
    sha256 = hash_of_run(folder, manifest)
    if not is_same_run(config, folder, sha256, asked):
        words = decided_otherwise(config, folder, sha256, asked)
        add = f"; add {' '.join(words)} to go on with it, which is decided otherwise now" if words else ""
        return f"it holds a run ({state}) of another configuration, which is in {folder / 'run.yaml'}{add}"
    if state == RunState.finished.name:
        return "its run has finished (evaluate it again with: tunebook eval)"
    if state == RunState.invalid.name:
        return "its run ended with a loss that is not finite, and would again"
    return None if _is_unfinished(folder, manifest) else "a run is at work in it"


def _is_unfinished(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether a run ended early. One that says `running` is, unless it was killed; or it runs on another machine."""
    state = manifest["status"]["state"]
    return state in _UNFINISHED or (state == RunState.running.name and not is_worked_in(folder))


def _has_progress(folder: Path, config: RunConfig) -> bool:
    return newest_checkpoint(folder) is not None or is_trained(folder, config)


def is_trained(folder: Path, config: RunConfig) -> bool:
    """Whether every rank has trained to the end, so that no more than the evaluation is left to do."""
    return (folder / "model").is_dir() and read_outcomes(folder, world_size(config)).exit_code == 0
