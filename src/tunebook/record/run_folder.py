"""Run folders, `outputs/<recipe>/<time>/`: made before anything else of a run, found again by name later.

Also how each rank ended: it says so in a file of its own, since torchrun turns every failure into exit code 1.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tunebook.config.book import require_possible
from tunebook.errors import DoesNotFitError, RequestError, TunebookError, did_you_mean
from tunebook.files import atomic_write_json, read_json
from tunebook.hardware.disk import existing

LATEST = "latest"
LOCK_FILE = ".lock"
WITHOUT_RECIPE = "custom"  # the folder of runs that name no recipe, and what evidence calls it
FINISHED = "finished"  # the reason of a rank that trained to the last step
MINIMUM_FREE_GIB = 0.1  # room for metrics, manifest and report; checkpoints are planned for by the caller
_RUN_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d{3,})?")
_NUM_RUNS_LISTED = 8
_LOCK_POLL_S = 0.5
# The most telling code first. 7 and 6 are decisions the ranks take together, and torchrun may kill the others before
# they can say so; a named error says more than 1 (unexpected, or killed); 0 only when every rank says 0.
_MOST_TELLING = (7, 6, 4, 3, 2, 5, 1, 0)


def create_run_folder(outputs: Path, recipe: str, now: datetime | None = None) -> Path:
    """Make `outputs/<recipe>/<UTC time>[-NNN]/` and point `latest` at it; NNN tells runs of the same second apart.

    Raises: RequestError when it cannot be written to, DoesNotFitError when the disk is full. Nothing is left then.
    """
    outputs = outputs.expanduser().absolute()
    check_outputs(outputs)
    recipe_folder = outputs / recipe
    name = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H-%M-%SZ")
    try:
        recipe_folder.mkdir(parents=True, exist_ok=True)
        folder = _make_unique(recipe_folder, name)
    except OSError as error:
        raise _cannot_write(outputs, error) from error
    _point_latest_at(folder)
    return folder


def make_run_folder(folder: Path) -> Path:
    """Make a run folder that the user named, or find it there. Raises: as `create_run_folder`."""
    check_outputs(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return folder


def remove_if_empty(folder: Path) -> None:
    """Take a run folder away again in which nothing was begun; `latest` points at the newest of the others then."""
    try:
        folder.rmdir()
    except OSError:  # it holds something, which is kept
        return
    latest = folder.with_name(LATEST)
    with suppress(OSError):  # what is being refused matters more
        if latest.is_symlink() and latest.readlink() == Path(folder.name):
            latest.unlink(missing_ok=True)
            if (before := latest_run(folder.parent.parent, folder.parent.name)) is not None:
                _point_latest_at(before)


def check_outputs(folder: Path) -> None:
    """Refuse a folder that cannot be written to or whose disk is full, before work is done that would be lost.

    The folder need not exist yet. Raises: RequestError, DoesNotFitError.
    """
    folder = require_possible(folder.expanduser().absolute())
    _check_writable(folder)
    try:
        check_free_space(folder, MINIMUM_FREE_GIB)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def check_free_space(path: Path, needed_gib: float) -> None:
    """Raise DoesNotFitError unless the disk that holds `path` (which need not exist yet) has `needed_gib` free."""
    disk = shutil.disk_usage(existing(path))
    free_gib = disk.free / 2**30
    # A total of zero is a file system that does not count, such as some network mounts: the writes will tell.
    if disk.total and free_gib < needed_gib:
        raise DoesNotFitError(
            f"the disk of {path} has {free_gib:.1f} GiB free and this run writes about {needed_gib:.1f} GiB; "
            "free some space, keep fewer checkpoints (training.keep_checkpoints=1), "
            "or write elsewhere: outputs=/a/folder/on/another/disk",
            problem_id="disk-full",
        )


def is_run(folder: Path) -> bool:
    """Whether a folder is one run's: it holds a frozen `run.yaml` or a manifest."""
    return (folder / "run.yaml").is_file() or (folder / "manifest.json").is_file()


def find_runs(outputs: Path, recipe: str | None = None) -> list[Path]:
    """Every run under `outputs`, of one recipe or of all, oldest first."""
    outputs = outputs.expanduser().absolute()
    folders = outputs.glob("*/*") if recipe is None else (outputs / recipe).glob("*")  # a name is no pattern
    return sorted((f for f in folders if _RUN_NAME.fullmatch(f.name) and is_run(f)), key=_age)


def latest_run(outputs: Path, recipe: str | None = None) -> Path | None:
    """The newest run, of one recipe or of all; None when there is none."""
    # Not by the `latest` link: two runs that start together may link in the other order.
    runs = find_runs(outputs, recipe)
    return runs[-1] if runs else None


def resolve_run(text: str, outputs: Path) -> Path:
    """The folder of a run named as a folder (of a recipe: its newest), as `latest`, a recipe or `<recipe>/<time>`.

    A path never means the recipe of its last word: it would be another run, or a model of the hub, than was named.
    Raises: RequestError listing the newest runs there are.
    """
    outputs = outputs.expanduser().absolute()
    named = Path(text).expanduser().absolute()
    for folder in (named, outputs / text):
        if is_run(folder):
            return folder.resolve()
    found = latest_run(outputs) if text == LATEST else None
    if found is None and named.is_dir():
        found = latest_run(named.parent, recipe=named.name)
    recipe = text.rstrip("/")  # which a shell's completion adds
    if found is None and recipe and "/" not in recipe:
        found = latest_run(outputs, recipe)
    if found is None:
        raise RequestError(_unknown_run(text, outputs), problem_id="unknown-run")
    return found


def resolve_runs(texts: Sequence[str], outputs: Path) -> list[Path]:
    """The folders of runs that are to be compared, each named as for `resolve_run`.

    Raises: RequestError as that does, and where two names mean the same run.
    """
    named: dict[Path, str] = {}
    for text in texts:
        folder = resolve_run(text, outputs)
        if folder in named:
            raise RequestError(
                f"{named[folder]} and {text} are the same run, {folder}, and it is no different from itself; name "
                "another one",
                problem_id="run-named-twice",
            )
        named[folder] = text
    return list(named)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank, or the whole run, ended."""

    rank: int
    exit_code: int
    reason: str
    step: int | None  # the last finished optimizer step
    last_checkpoint: str | None  # the last good one, relative to the run folder where it lies in it
    best_step: int | None = None  # that the weights in `model/` are of, where the best were loaded
    time: float | None = None  # seconds since 1970; the rank that fails first says why, the others that it is gone


def noted_checkpoint(folder: Path, checkpoint: Path | None) -> str | None:
    """A checkpoint as an outcome names it."""
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
    """Record how this rank ended as `outcome-<rank>.json`."""
    outcome = Outcome(
        rank=rank, exit_code=exit_code, reason=reason, step=step,
        last_checkpoint=noted_checkpoint(folder, last_checkpoint), best_step=best_step, time=time.time(),
    )  # fmt: skip
    atomic_write_json(outcome_file(folder, rank), asdict(outcome))


def read_outcomes(folder: Path, world_size: int) -> Outcome:
    """How the run ended: the outcome of the rank whose exit code says the most, of those the first in time.

    A rank that left none counts as 1; it is named beside the others', which can only say that they lost it.
    """
    outcomes = [_read_outcome(folder, rank) for rank in range(world_size)]
    told = min(outcomes, key=lambda o: (_MOST_TELLING.index(o.exit_code), o.time is None, o.time or 0, o.rank))
    silent = [outcome for outcome in outcomes if outcome.time is None]
    if told.exit_code != 1 or told.time is None or not silent:
        return told
    return replace(told, reason=f"{silent[0].reason}. Rank {told.rank} says: {told.reason}")


def trained_outcome(folder: Path) -> Outcome | None:
    """What the first rank said of a training that came to its end; None where it has not."""
    outcome = _read_outcome(folder, 0)
    return outcome if outcome.exit_code == 0 else None


def has_outcome(folder: Path) -> bool:
    """Whether any rank has said how it ended."""
    return any(folder.glob("outcome-*.json"))


def clear_outcomes(folder: Path) -> None:
    """Remove the outcomes of an earlier attempt, before a requeued run goes on in its own folder."""
    for file in folder.glob("outcome-*.json"):
        file.unlink()


def _unknown_run(text: str, outputs: Path) -> str:
    runs = find_runs(outputs)
    if not runs:
        return f"there is no run '{text}': {outputs} holds no runs yet; make one with: tunebook train quickstart"
    names = [str(run.relative_to(outputs)) for run in reversed(runs)]
    recipes = sorted({run.parent.name for run in runs})
    more = f" and {len(names) - _NUM_RUNS_LISTED} older" if len(names) > _NUM_RUNS_LISTED else ""
    return (
        f"there is no run '{text}'.{did_you_mean(text, [*recipes, *names])} Say a run folder, `latest`, or a recipe "
        f"for its newest run. Runs in {outputs}, newest first: {', '.join(names[:_NUM_RUNS_LISTED])}{more}"
    )


def _age(run: Path) -> tuple[str, int]:
    second, _, number = run.name.partition("Z")
    return second, int(number[1:] or 0) if number else 0


def _make_unique(recipe_folder: Path, name: str) -> Path:
    number = 1
    while True:
        folder = recipe_folder / (name if number == 1 else f"{name}-{number:03d}")
        # mkdir is atomic on local and network file systems alike: of two processes exactly one gets the name.
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _point_latest_at(folder: Path) -> None:
    beside = folder.with_name(f".{LATEST}-{os.getpid()}-{secrets.token_hex(4)}")
    # A convenience for people: a file system without links must not stop a run.
    with suppress(OSError):
        beside.symlink_to(folder.name)
        beside.replace(folder.with_name(LATEST))
    beside.unlink(missing_ok=True)


def _check_writable(outputs: Path) -> None:
    there = existing(outputs)
    if not there.is_dir():
        raise _cannot_write(outputs, NotADirectoryError(errno.ENOTDIR, f"{there} is a file"))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _cannot_write(outputs, PermissionError(errno.EACCES, f"no permission to write in {there}"))


def _cannot_write(outputs: Path, error: OSError) -> TunebookError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DoesNotFitError(
            f"no run folder can be made in {outputs}: {error.strerror}; free some space (or file entries), "
            "or write elsewhere: outputs=/a/folder/on/another/disk",
            problem_id="disk-full",
        )
    return RequestError(
        f"no run folder can be made in {outputs}: {error.strerror}; "
        "make it writable, or write elsewhere: outputs=/a/folder/of/yours",
        problem_id="outputs-not-writable",
    )


def outcome_file(folder: Path, rank: int) -> Path:
    """Where a rank writes how it ended."""
    return folder / f"outcome-{rank}.json"


def _read_outcome(folder: Path, rank: int) -> Outcome:
    file = outcome_file(folder, rank)
    if not file.is_file():
        reason = f"rank {rank} ended without a word: it was killed (out of memory?), or crashed before it could speak"
        return Outcome(rank=rank, exit_code=1, reason=reason, step=None, last_checkpoint=None)
    outcome = Outcome(**read_json(file))
    if outcome.exit_code not in _MOST_TELLING:  # a signal's number, or a library's own code
        reason = f"exit code {outcome.exit_code}: {outcome.reason}"
        return Outcome(**{**asdict(outcome), "exit_code": 1, "reason": reason})
    return outcome


# Who is at work in a run folder: a lock that the system gives back when its holders end, however they do. The launcher
# takes it and its ranks keep it open. So a run whose manifest says `running` and whose lock is free was killed.
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
    """Whether some process holds the folder's lock; a folder that never had one counts, since nothing is known."""
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
