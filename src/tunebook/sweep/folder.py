"""A sweep's folder: its request, its progress, and whether the same request resumes it.

    outputs/<recipe>/sweep-<UTC time>/
      sweep.json       the request
      trial-000/       a run folder;  trial-000.json: how its process ended;  trial-000.log: its output, if redirected
      study.jsonl      of a search: proposals and their results
      sweep.csv        the ranked table

A trial is done once its training finished, was invalid (exit code 7) or was pruned. The same command runs any other
trial again, because its problem may be fixed by then, such as a full disk or a missing file. A trial that fails again
costs only seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunebook.errors import (
    DataError,
    DoesNotFitError,
    RequestError,
    TunebookError,
)
from tunebook.files import atomic_write_json, read_json
from tunebook.hardware.disk import tells_of_full_disk
from tunebook.record.manifest import MANIFEST_FILE, RunState, read_manifest
from tunebook.record.run_folder import age_key, make_unique, time_name, working_in
from tunebook.sweep.trial_process import TrialEnd, read_trial_end, write_trial_end
from tunebook.sweep.trials import Trial, parse_sweep_overrides

SWEEP_FILE = "sweep.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """The identity of a sweep. How trials are launched, and the number of trials of a search, may change.

    A trial cannot resume with another number of GPUs. So another `--jobs` may make another sweep, if it decides that
    number.
    """

    recipe: str | None
    overrides: list[str]  # without `training.resume=never`, which says what to do with the sweep, not which one
    config_sha256: str  # of the first trial, on any machine: an edited recipe is another sweep
    search: dict[str, Any] | None  # None: a list of trials
    gpus_per_trial: int | None = None  # for trials that do not set it, if the GPUs found here are divided


@dataclass(frozen=True, kw_only=True)
class SweepFolder:
    """The folder of a sweep and the files of its trials."""

    path: Path

    def run_folder(self, trial: Trial) -> Path:
        """A trial's run folder."""
        return self.path / trial.name

    def end_file(self, trial: Trial) -> Path:
        """The file that records how a trial's process ended."""
        return self.path / f"{trial.name}.json"

    def output(self, trial: Trial) -> Path:
        """The file for a trial's output if it does not print to the terminal."""
        return self.path / f"{trial.name}.log"

    def end_of(self, trial: Trial) -> TrialEnd | None:
        """Return how a trial ended; from its run's manifest if the sweep was killed before it could record that."""
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
        end = self.end_of(trial)
        return end is not None and end.is_done

    def has_filled_disk(self, trial: Trial) -> bool:
        """Whether a trial ended because its disk is full, as the next one would."""
        end, file = self.end_of(trial), self.run_folder(trial) / MANIFEST_FILE
        if end is None or end.exit_code != DoesNotFitError.exit_code or not file.is_file():
            return False
        return tells_of_full_disk(end.reason or read_manifest(file.parent)["status"]["reason"] or "")


def newest_with(request: Request, outputs: Path, recipe: str) -> SweepFolder | None:
    """Return the newest sweep with an equal request, in whatever order its overrides were typed; else None."""
    wanted = {"format": FORMAT, **asdict(request), "overrides": _in_order(request.overrides)}
    found = (outputs.expanduser().absolute() / recipe).glob(f"sweep-*/{SWEEP_FILE}")
    for file in sorted(found, key=lambda file: age_key(file.parent), reverse=True):
        try:
            record = read_json(file)
        except DataError:
            continue  # a damaged record of another sweep must not stop this one
        record["overrides"] = _in_order(record.get("overrides", []))
        if wanted == {key: record.get(key) for key in wanted}:
            return SweepFolder(path=file.parent)
    return None


def _in_order(words: list[str]) -> list[str]:
    """Sort a sweep's overrides so that requests for the same trials in the same order compare equal.

    Keys with several values keep their order, which numbers the trials. If a key is repeated, its last override wins.
    """
    try:
        parsed = parse_sweep_overrides(words)
    except TunebookError:  # from a hand-written record: compared as it is
        return words
    pairs = list(zip(words, parsed, strict=True))
    fixed = [(override.key_or_group, word) for word, override in pairs if not override.is_sweep_override()]
    listed = [word for word, override in pairs if override.is_sweep_override()]
    return [*(word for _, word in sorted(fixed, key=lambda pair: pair[0])), *listed]


def create(request: Request, outputs: Path, recipe: str) -> SweepFolder:
    """Make `outputs/<recipe>/sweep-<UTC time>[-NNN]/`. Raises: RequestError if it cannot be written."""
    recipe_folder = outputs.expanduser().absolute() / recipe
    time = time_name()
    try:
        recipe_folder.mkdir(parents=True, exist_ok=True)
        folder = make_unique(recipe_folder, f"sweep-{time}")
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
    """Lock a sweep's folder. Raises: RequestError while another process holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(working_in(folder.path))
        except RequestError as error:
            raise RequestError(
                f"this sweep is at work in {folder.path}, started by another process; wait for it, or start another in "
                "addition: training.resume=never",
                problem_id="sweep-is-running",
            ) from error
        yield
