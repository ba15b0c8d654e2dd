"""A sweep's folder, and its Optuna study, which holds every trial and its result and resumes an interrupted sweep.

    outputs/<recipe>/sweep-<UTC time>/
      sweep.json       the request
      study.jsonl      Optuna's journal: the trials, their values and results
      trial-000/       a run folder;  trial-000.log: what its command prints
      sweep.csv        the ranked table

A grid is a study whose trials were all enqueued. A trial that was stopped, killed or failed stays open in the study,
and the same command runs it again: the cause may be gone, such as a full disk. It resumes from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tunebook.errors import InvalidTrainingError
from tunebook.files import atomic_write_json, read_json, sha256_text
from tunebook.record.manifest import manifest_or_empty
from tunebook.record.metrics import read_metrics
from tunebook.record.run_folder import age_key, make_run_folder, make_unique, time_name
from tunebook.sweep.space import Space, Values, as_text, read_space
from tunebook.sweep.table import LOGGED_WHILE_RUNNING, Row, TrialResult, cost_of, read_result, write_csv

SWEEP_FILE = "sweep.json"
STUDY_FILE = "study.jsonl"
RESUMES = "training.resume=auto"
_NAME = "sweep"  # of the one study in the journal
_NUM_NEVER_PRUNED = 5  # Optuna's default: there is no median of one or two trials
_FINAL = (0, InvalidTrainingError.exit_code)  # exit codes of trials that would end the same way again


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The content of sweep.json."""

    recipe: str | None
    recipes_dirs: list[str]
    overrides: list[str]  # training.resume=never is about the sweep, and its trials resume
    config_sha256: str  # of the first trial, on any machine: an edited recipe is another sweep
    num_trials: int | None  # of a search; None: a grid
    metric: str
    seed: int = 0  # of the search
    prune: int | None = None  # the first step after which a trial may be ended early
    is_array: bool = False  # the trials are tasks of a Slurm job array

    @cached_property
    def space(self) -> Space:
        """What the trials are chosen from."""
        return read_space(self.overrides, is_search=self.num_trials is not None)

    @property
    def identity(self) -> str:
        """Equal for the same sweep. A search may get more trials, and a grid may be ranked by another metric."""
        search = None if self.num_trials is None else [self.metric, self.seed]
        overrides = sorted(override for override in self.overrides if override != RESUMES)
        return sha256_text(json.dumps([overrides, search, self.config_sha256]))


def find_folder(sweep: Sweep, outputs: Path) -> Path | None:
    """Return the newest folder of the same sweep, if there is one."""
    for file in sorted(outputs.glob(f"sweep-*/{SWEEP_FILE}"), key=lambda file: age_key(file.parent), reverse=True):
        if read_json(file).get("identity") == sweep.identity:
            return file.parent
    return None


def make_folder(outputs: Path) -> Path:
    """Make `outputs/sweep-<UTC time>[-NNN]/`. Raises: RequestError if it cannot be written."""
    return make_unique(make_run_folder(outputs), f"sweep-{time_name()}")


def write_sweep(sweep: Sweep, folder: Path) -> None:
    """Write sweep.json."""
    atomic_write_json(folder / SWEEP_FILE, {"identity": sweep.identity, **asdict(sweep)})


def read_sweep(folder: Path) -> Sweep:
    """Read sweep.json."""
    record = read_json(folder / SWEEP_FILE)
    del record["identity"]
    return Sweep(**record)


class Study:
    """The trials of a sweep. Several processes may share one, as the tasks of a Slurm job array do."""

    def __init__(self, folder: Path, sweep: Sweep) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.sweep = folder, sweep
        self._storage = JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            pruner=MedianPruner(_NUM_NEVER_PRUNED, n_warmup_steps=sweep.prune) if sweep.prune else NopPruner(),
            load_if_exists=True,
        )

    @cached_property
    def grid(self) -> list[Values]:
        """The values of every trial, by number; empty for a search."""
        return self.sweep.space.grid() if self.sweep.num_trials is None else []

    @property
    def num_trials(self) -> int:
        """The total number of trials."""
        return self.sweep.num_trials or len(self.grid)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials so far, by number."""
        return self._study.get_trials(deepcopy=False)

    @property
    def num_left(self) -> int:
        """The number of trials that wait or that were not proposed yet."""
        trials = self.trials
        return max(0, self.num_trials - len(trials)) + sum(trial.state is TrialState.WAITING for trial in trials)

    @property
    def num_open(self) -> int:
        """The number of trials that are left or have not ended for good."""
        return self.num_left + sum(trial.state is TrialState.RUNNING for trial in self.trials)

    def run_folder(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.folder / f"trial-{number:03d}"

    def log_file(self, number: int) -> Path:
        """The file with what a trial prints."""
        return self.folder / f"trial-{number:03d}.log"

    def enqueue_grid(self) -> None:
        """Add the trials of a grid that are not in the study yet."""
        for values in self.grid[len(self.trials) :]:
            self._study.enqueue_trial(values)

    def reopen(self, condition: Callable[[FrozenTrial], bool] = lambda trial: True) -> None:
        """Let open trials run again. Only for trials whose processes have ended.

        A trial that finished while nobody waited for it, since the sweep was killed, gets its result.
        """
        for trial in filter(condition, self.trials):
            if trial.state is not TrialState.RUNNING:
                continue
            status = manifest_or_empty(self.run_folder(trial.number)).get("status", {})
            if status.get("exit_code") in _FINAL:
                self.finish(trial.number, status["exit_code"], seconds=status["seconds"] or 0.0)
            else:
                self._storage.set_trial_state_values(self._id_of(trial.number), TrialState.WAITING)

    def next_trial(self, seed: int | None = None) -> optuna.Trial | None:
        """Return a trial that waits, or else a new proposal, by TPE; None if there are enough.

        Each proposal has a seed of its own, so that neither a resumed sweep nor another process repeats one.
        """
        num_known = len(self.trials)
        if self.num_left == 0:
            return None
        self._study.sampler = TPESampler(seed=self.sweep.seed + (num_known if seed is None else seed))
        return self._study.ask(self.sweep.space.choices)

    def worse_at(self, trial: optuna.Trial) -> int | None:
        """Report what a trial has logged since the last call; return the first step at which it was to be pruned."""
        reported, worse_at = self.trials[trial.number].intermediate_values, None
        for line in read_metrics(self.run_folder(trial.number)):
            value, step = line.get(LOGGED_WHILE_RUNNING[self.sweep.metric]), int(line["step"])
            if value is not None and step not in reported:
                trial.report(value, step)
                if worse_at is None and trial.should_prune():
                    worse_at = step
        return worse_at

    def finish(
        self, number: int, exit_code: int, *, seconds: float, ending: str | None = None, was_pruned: bool = False
    ) -> TrialResult:
        """Record how a turn of a trial ended, also in sweep.csv. `ending` is what only the sweep knows of it."""
        before = self.trials[number].user_attrs.get("result", {}).get("seconds", 0.0)
        result = read_result(
            self.run_folder(number),
            self.log_file(number),
            exit_code,
            seconds=round(before + seconds, 1),
            ending=ending,
            was_pruned=was_pruned,
        )
        self._storage.set_trial_user_attr(self._id_of(number), "result", asdict(result))
        cost = cost_of(result, self.sweep.metric)
        if result.was_pruned:
            self._study.tell(number, state=TrialState.PRUNED)
        elif cost is not None:
            self._study.tell(number, cost)
        elif exit_code in _FINAL:  # without the metric, or an invalid training
            self._study.tell(number, state=TrialState.FAIL)
        write_csv(self.rows(), self.sweep.metric, self.sweep.space.fixed, self.folder)
        return result

    def rows(self) -> list[Row]:
        """Return every trial so far with its last result."""
        results = [trial.user_attrs.get("result") for trial in self.trials]
        return [
            Row(
                number=trial.number,
                values=as_text(trial.params or self.grid[trial.number]),
                result=TrialResult(**result) if result else None,
            )
            for trial, result in zip(self.trials, results, strict=False)
        ]

    def _id_of(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(_NAME)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)
