"""Which run `latest` or a recipe's name means where a trained model is needed: the newest that finished.

A run that is at work, was stopped or has failed is passed over, and why is told; it can still be named by its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunebook.checkpoint.newest import complete_checkpoints
from tunebook.checkpoint.record import CHECKPOINTS_FOLDER
from tunebook.errors import DataError, RequestError
from tunebook.model.adapters import holds_model
from tunebook.model.hub import WEIGHT_FILES
from tunebook.record.manifest import RunState, read_manifest
from tunebook.record.run_folder import LATEST, find_runs, is_run, resolve_run

_NUM_NAMED = 3  # passed-over runs that a message names; the others are counted


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A newer run that was not taken, and why."""

    run: Path
    why: str


def choose_run(target: str, outputs: Path, say: Callable[[str], None]) -> Path:
    """The run that a target means; what was chosen and passed over is said. A folder that is named is always taken.

    Raises: RequestError when there is none, or when none has finished.
    """
    outputs = outputs.expanduser().absolute()
    named = resolve_run(target, outputs)
    if is_run(Path(target).expanduser()) or is_run(outputs / target):
        return named
    is_any = target == LATEST
    runs = find_runs(outputs) if is_any else find_runs(named.parent.parent, named.parent.name)
    passed_over: list[PassedOver] = []
    for run in reversed(runs):
        why = why_not_finished(run)
        if why is None:
            say(f"the newest finished run{'' if is_any else f' of {run.parent.name}'}: {run}")
            for line in _told(passed_over):
                say(f"  newer, but {line}")
            return run
        passed_over.append(PassedOver(run=run, why=why))
    of = "" if is_any else f" of {named.parent.name}"
    raise RequestError(
        f"no run{of} has finished: {'; '.join(_told(passed_over))}. Name one by its folder to take it as it is "
        f"(run={passed_over[0].run}), or one of its checkpoints: {checkpoints_of(passed_over[0].run)}",
        problem_id="run-without-model",
    )


def why_not_finished(run: Path) -> str | None:
    """Why a run is not one that finished with a model, or None where it is."""
    try:
        status = read_manifest(run)["status"]
        state, reason = status["state"], status["reason"]
    except (DataError, KeyError, TypeError):
        return "its manifest cannot be read"
    if state == RunState.running.name:
        return "it is running, or was killed without a word"
    if state == RunState.stopped.name and reason:  # such as `stopped by SIGTERM after step 98`
        return str(reason).splitlines()[0]
    if state != RunState.finished.name:
        return f"it {_STATES.get(state, state)}" + (f": {str(reason).splitlines()[0]}" if reason else "")
    return None if holds_model(run / "model") else "its model/ folder is gone"


_STATES = {
    RunState.stopped.name: "was stopped",
    RunState.failed.name: "failed",
    RunState.invalid.name: "is invalid",
}


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights as one model; a sharded checkpoint does not."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def checkpoints_of(run: Path) -> str:
    """The complete checkpoints of a run that hold a whole model, newest first, for a message."""
    complete = complete_checkpoints(run / CHECKPOINTS_FOLDER)
    whole = [folder for folder in complete if holds_model(folder) and has_weights(folder)]
    if whole:
        return ", ".join(map(str, whole))
    if complete:
        return f"they are sharded, so make a whole model of the newest with: tunebook export {run}"
    return "there is none that is complete, so go on training"


def _told(passed_over: list[PassedOver]) -> list[str]:
    told = [f"{entry.run.parent.name}/{entry.run.name}: {entry.why}" for entry in passed_over[:_NUM_NAMED]]
    more = len(passed_over) - _NUM_NAMED
    return [*told, f"{more} more that did not finish"] if more > 0 else told
