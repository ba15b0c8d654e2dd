"""A sweep's folder: what was asked for, how far it came, and whether the same request goes on in it.

    outputs/<recipe>/sweep-<UTC time>/
      sweep.json       the request
      trial-000/       a run folder;  trial-000.json how its process ended;  trial-000.log what it printed, if not here
      study.jsonl      of a search: what was proposed and what came of it
      sweep.csv        the ranked table

A trial is done once its training finished or ended in a way that it would end in again (exit codes 2 to 5 and 7, or
pruned). One that was stopped, killed or failed unexpectedly (1) is taken up by the same command.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from tunebook.errors import DataError, RequestError
from tunebook.launch.lock import working_in
from tunebook.record.atomic_files import atomic_write_json, read_json
from tunebook.record.manifest import MANIFEST_FILE, RunState, read_manifest
from tunebook.sweep.trial_process import TrialEnd, read_trial_end, write_trial_end
from tunebook.sweep.trials import Trial

SWEEP_FILE = "sweep.json"
FORMAT = 1
_AGAIN = (1, 6)  # exit codes of trials that the same command takes up


@dataclass(frozen=True, kw_only=True)
class Request:
    """What makes two sweeps the same. How trials are launched, and how many a search may take, can change.

    A trial cannot go on with another number of GPUs: where `--jobs` decides that, other jobs may be another sweep.
    """

    recipe: str | None
    overrides: list[str]
    config_sha256: str  # of the first trial, resolved: an edited recipe is another sweep
    search: dict[str, Any] | None  # None: a list
    gpus_per_trial: int | None = None  # of trials that leave it open, where the GPUs found here are divided


@dataclass(frozen=True, kw_only=True)
class SweepFolder:
    """Where a sweep keeps its trials."""

    path: Path

    def run_folder(self, trial: Trial) -> Path:
        """A trial's run folder."""
        return self.path / trial.name

    def end_file(self, trial: Trial) -> Path:
        """How its process ended."""
        return self.path / f"{trial.name}.json"

    def output(self, trial: Trial) -> Path:
        """What it printed, where it does not print to the terminal."""
        return self.path / f"{trial.name}.log"

    def end_of(self, trial: Trial) -> TrialEnd | None:
        """How a trial ended; read from its run where the sweep was killed before it could write that down."""
        end = read_trial_end(self.end_file(trial))
        if end is not None or not (self.run_folder(trial) / MANIFEST_FILE).is_file():
            return end
        manifest = read_manifest(self.run_folder(trial))
        status = manifest["status"]
        if status["state"] == RunState.running.name:
            return None
        turns = [*manifest.get("earlier_attempts", []), status]
        seconds, code = sum(float(turn["seconds"] or 0.0) for turn in turns), int(status["exit_code"])
        end = TrialEnd(exit_code=code, seconds=round(seconds, 1), was_interrupted=code == 6)
        write_trial_end(end, self.end_file(trial))
        return end

    def is_done(self, trial: Trial) -> bool:
        """Whether a trial need not run (again)."""
        return is_done(self.end_of(trial))

    def begin(self, trial: Trial) -> float:
        """Take away how an earlier attempt ended; the seconds that it, and those before it, took."""
        end = read_trial_end(self.end_file(trial))
        self.end_file(trial).unlink(missing_ok=True)
        return 0.0 if end is None else end.seconds


def is_done(end: TrialEnd | None) -> bool:
    """Whether a trial that ended so would not come further by running again."""
    return end is not None and (end.was_pruned or end.exit_code not in _AGAIN)


def newest_with(request: Request, outputs: Path, recipe: str) -> SweepFolder | None:
    """The newest sweep that was asked for the same."""
    found = (outputs.expanduser().absolute() / recipe).glob(f"sweep-*/{SWEEP_FILE}")
    for file in sorted(found, key=lambda file: _age(file.parent), reverse=True):
        try:
            record = read_json(file)
        except DataError:
            continue  # a damaged record of another sweep must not stop this one
        if record.get("format") == FORMAT and {key: record.get(key) for key in asdict(request)} == asdict(request):
            return SweepFolder(path=file.parent)
    return None


def create(request: Request, outputs: Path, recipe: str) -> SweepFolder:
    """Make `outputs/<recipe>/sweep-<UTC time>[-NNN]/`. Raises: RequestError when it cannot be written to."""
    recipe_folder = outputs.expanduser().absolute() / recipe
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    try:
        recipe_folder.mkdir(parents=True, exist_ok=True)
        folder = _make_unique(recipe_folder, f"sweep-{time}")
        atomic_write_json(folder / SWEEP_FILE, {"format": FORMAT, **asdict(request), "created": time})
    except OSError as error:
        raise RequestError(
            f"no sweep folder can be made in {recipe_folder}: {error.strerror}; make it writable, or write elsewhere: "
            "outputs=/a/folder/of/yours",
            problem_id="outputs-not-writable",
        ) from error
    return SweepFolder(path=folder)


@contextmanager
def working_on(folder: SweepFolder) -> Iterator[None]:
    """Hold a sweep's folder. Raises: RequestError while another process holds it."""
    context = working_in(folder.path)
    try:
        context.__enter__()
    except RequestError as error:
        raise RequestError(
            f"this sweep is at work in {folder.path}, started by another process; wait for it, or start another beside "
            "it: training.resume=never",
            problem_id="sweep-is-running",
        ) from error
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def _make_unique(recipe_folder: Path, name: str) -> Path:
    for number in count(1):
        folder = recipe_folder / (name if number == 1 else f"{name}-{number:03d}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always a next number")


def _age(folder: Path) -> tuple[str, int]:
    second, _, number = folder.name.partition("Z")
    return second, int(number[1:] or 0) if number else 0
