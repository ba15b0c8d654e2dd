"""Run folders, `outputs/<recipe>/<time>/`: created first of all, and found by name later.

Also the result of each rank, which it writes to a file, since torchrun turns every failure into exit code 1.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tunebook.config.book import recipe_name, resolve_path
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError, did_you_mean
from tunebook.files import atomic_write_json, read_json
from tunebook.hardware.disk import existing, require_space

LATEST = "latest"
LOCK_FILE = ".lock"
FINISHED = "finished"  # the reason of a rank that trained to the last step
_MINIMUM_FREE_BYTES = 100 * 2**20  # for metrics, manifest and report. Callers check the space for checkpoints
_RUN_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d{3,})?")
_NUM_RUNS_LISTED = 8
_LOCK_POLL_S = 0.5
# Exit codes, the most specific first. All ranks agree on 7 and 6, but torchrun may kill some of them before
# they record it. A named error is more specific than 1 (unexpected, or killed). 0 only if every rank has 0.
_MOST_SPECIFIC = (7, 6, 4, 3, 2, 5, 1, 0)
RUN_FILE = "run.yaml"
PLAN_FILE = "plan.json"
LOG_FILE = "log.txt"  # of the libraries, in training and evaluation
UNSAVED_FILE = ".unsaved"  # empty; where it is there, the ranks write no model: the run is a measurement
PREPARED_FILE = "prepared.json"
MODEL_FOLDER = "model"  # the trained model
STOP_FILE = ".stop"  # what asks ranks on other machines to stop, as text
DEEPSPEED_FILE = "deepspeed.json"  # ZeRO only: what DeepSpeed was started with, every "auto" filled in


def time_name() -> str:
    """The time, UTC, as the names of runs, sweeps and evaluations have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def run_name(config: RunConfig) -> str:
    """What a run is called in `outputs/`: its recipe's name, or of a run without one the name of its data."""
    if config.recipe is not None:
        return recipe_name(config.recipe)
    data = config.dataset
    parts = [part for part in resolve_path(data.path or data.name or data.source.name).parts if "*" not in part]
    return re.sub(r"[^\w.-]+", "_", Path(parts[-1].removesuffix(".gz")).stem).strip(".") or "data"


def create_run_folder(outputs: Path, name: str) -> Path:
    """Make `outputs/<name>/<UTC time>[-NNN]/` and point `latest` at it. NNN separates runs of the same second.

    Raises: RequestError if it cannot be written, DoesNotFitError if the disk is full.
    """
    folder = make_unique(make_run_folder(outputs.expanduser().absolute() / name), time_name())
    temporary = folder.with_name(f".{LATEST}-{os.getpid()}-{secrets.token_hex(4)}")
    with suppress(OSError):  # the link is a convenience: a file system without links must not stop a run
        temporary.symlink_to(folder.name)
        temporary.replace(folder.with_name(LATEST))
    temporary.unlink(missing_ok=True)
    return folder


def make_run_folder(folder: Path) -> Path:
    """Make a run folder that the user named; it may exist. Raises: as `create_run_folder`."""
    check_outputs(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_outputs(folder: Path) -> None:
    """Check that a folder, which need not exist yet, can be written and its disk is not full.

    Called before work that would be lost. Raises: RequestError, DoesNotFitError.
    """
    folder = folder.expanduser().absolute()
    nearest = existing(folder)
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise RequestError(
            f"no run folder can be made in {folder}: {nearest} is a file, or you may not write in it; make it "
            "writable, or write elsewhere: outputs=/a/folder/of/yours",
            problem_id="outputs-not-writable",
        )
    require_space(folder, _MINIMUM_FREE_BYTES, "a run folder")


def is_run(folder: Path) -> bool:
    """True for a run folder: it holds a frozen `run.yaml` or a manifest."""
    return (folder / RUN_FILE).is_file() or (folder / "manifest.json").is_file()


def find_runs(outputs: Path, recipe: str | None = None) -> list[Path]:
    """Every run under `outputs`, of one recipe or of all, oldest first."""
    outputs = outputs.expanduser().absolute()
    folders = outputs.glob("*/*") if recipe is None else (outputs / recipe).glob("*")  # a name is not a pattern
    return sorted((f for f in folders if _RUN_NAME.fullmatch(f.name) and is_run(f)), key=age_key)


def latest_run(outputs: Path, recipe: str | None = None) -> Path | None:
    """The newest run, of one recipe or of all; None if there is none."""
    # Not from the `latest` link: two runs that start together may write it in the other order.
    runs = find_runs(outputs, recipe)
    return runs[-1] if runs else None


def resolve_run(text: str, outputs: Path) -> Path:
    """The folder of a run that is named by its folder, by `latest`, by a recipe (its newest run) or `<recipe>/<time>`.

    Raises: RequestError that lists the newest runs.
    """
    outputs = outputs.expanduser().absolute()
    if text == LATEST and (newest := latest_run(outputs)) is not None:
        return newest
    for folder in (Path(text).expanduser().absolute(), outputs / text):
        if is_run(folder):
            return folder.resolve()
        if (newest := latest_run(folder.parent, folder.name)) is not None:
            return newest
    if text == LATEST:
        message = f"there is no run in {outputs}: tunebook train makes one, --outputs DIR names another folder"
        raise RequestError(message, problem_id="unknown-run")
    runs = [str(run.relative_to(outputs)) for run in reversed(find_runs(outputs))]
    recipes = sorted({run.partition("/")[0] for run in runs})
    listed = f"The newest runs are {', '.join(runs[:_NUM_RUNS_LISTED])}." if runs else f"There is none in {outputs}."
    raise RequestError(
        f"there is no run '{text}'.{did_you_mean(text, [*recipes, *runs], listed)} Type the folder of a run, `latest` "
        "or a recipe, for its newest run",
        problem_id="unknown-run",
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one rank, or of the whole run."""

    rank: int
    exit_code: int
    reason: str
    step: int | None  # the last finished optimizer step
    last_checkpoint: str | None  # the last good one, relative to the run folder if it is in it
    best_step: int | None = None  # of the weights in `model/`, if the best were loaded
    time: float | None = None  # seconds since 1970. The first rank to fail knows the reason; the others only lost it


def noted_checkpoint(folder: Path, checkpoint: Path | None) -> str | None:
    """The path of a checkpoint as an outcome records it."""
    if checkpoint is None:
        return None
    return str(checkpoint.relative_to(folder) if checkpoint.is_relative_to(folder) else checkpoint)


def write_outcome(
    folder: Path,
    rank: int,
    exit_code: int,
    reason: str,
    step: int | None = None,
    last_checkpoint: Path | None = None,
    best_step: int | None = None,
) -> None:
    """Write the result of this rank to `outcome-<rank>.json`."""
    outcome = Outcome(
        rank=rank, exit_code=exit_code, reason=reason, step=step,
        last_checkpoint=noted_checkpoint(folder, last_checkpoint), best_step=best_step, time=time.time(),
    )  # fmt: skip
    atomic_write_json(outcome_file(folder, rank), asdict(outcome))


def read_outcomes(folder: Path, world_size: int) -> Outcome:
    """The result of the run: of the ranks with the most specific exit code, the first in time.

    A rank without an outcome counts as exit code 1. The reason names it, since the others can only report its loss.
    """
    outcomes = [_read_outcome(folder, rank) for rank in range(world_size)]
    first = min(outcomes, key=lambda o: (_MOST_SPECIFIC.index(o.exit_code), o.time is None, o.time or 0, o.rank))
    missing = [outcome for outcome in outcomes if outcome.time is None]
    if first.exit_code != 1 or first.time is None or not missing:
        return first
    return replace(first, reason=f"{missing[0].reason}. Rank {first.rank} says: {first.reason}")


def trained_outcome(folder: Path) -> Outcome | None:
    """The first rank's outcome of a completed training; None if training has not completed."""
    outcome = _read_outcome(folder, 0)
    return outcome if outcome.exit_code == 0 else None


def has_outcome(folder: Path) -> bool:
    """True if any rank has recorded an outcome."""
    return any(folder.glob("outcome-*.json"))


def clear_outcomes(folder: Path) -> None:
    """Remove the outcomes of an earlier attempt, before a requeued run resumes in its own folder."""
    for file in folder.glob("outcome-*.json"):
        file.unlink()


def age_key(run: Path) -> tuple[str, int]:
    """What sorts the folders of runs, or of sweeps, by their age."""
    second, _, number = run.name.partition("Z")
    return second, int(number[1:] or 0) if number else 0


def make_unique(recipe_folder: Path, name: str) -> Path:
    """Make a new folder of this name, with a number added if it is taken."""
    number = 1
    while True:
        folder = recipe_folder / (name if number == 1 else f"{name}-{number:03d}")
        # mkdir is atomic, also on network file systems: of two processes exactly one gets the name.
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def outcome_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its result."""
    return folder / f"outcome-{rank}.json"


def _read_outcome(folder: Path, rank: int) -> Outcome:
    file = outcome_file(folder, rank)
    if not file.is_file():
        reason = f"rank {rank} ended without recording a reason: it was killed (out of memory?), or crashed"
        return Outcome(rank=rank, exit_code=1, reason=reason, step=None, last_checkpoint=None)
    outcome = Outcome(**read_json(file))
    if outcome.exit_code not in _MOST_SPECIFIC:  # a signal's number, or a library's own code
        return replace(outcome, exit_code=1, reason=f"exit code {outcome.exit_code}: {outcome.reason}")
    return outcome


# The lock of a run folder. The launcher takes it, its ranks inherit it, and the system releases it when they have all
# ended, in whatever way. So a run whose manifest says `running` and whose lock is free was killed.
@contextmanager
def working_in(folder: Path, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the folder's lock; yields the file descriptor that holds it.

    Raises: RequestError when another process holds it for longer than `wait_s`. On a file system without locks nothing
    is held.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    give_up_at = time.monotonic() + wait_s
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() < give_up_at:
                time.sleep(_LOCK_POLL_S)
                continue
            raise RequestError(
                f"a run is at work in {folder}; wait for it, or start another in a folder of its own (without "
                "--run-folder, or with training.resume=never)",
                problem_id="run-is-running",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def is_worked_in(folder: Path) -> bool:
    """True if a process holds the folder's lock, and for a folder without a lock file, of which nothing is known."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return True
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return kind == fcntl.LOCK_EX  # no locks here: go ahead, but never take over what may be another's
    return True
