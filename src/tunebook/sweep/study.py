"""A search: ask Optuna for trials and report their results to it, through a journal in the sweep's folder.

Every proposal has its own seed (the search's plus the trial's number), so it depends only on the finished trials. An
interrupted search that runs one trial at a time therefore resumes with the same proposals. The sampler is TPE, Optuna's
default. Its `constant_liar` keeps parallel proposals apart.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from optuna.trial import Trial as OptunaTrial

from tunebook.errors import RequestError
from tunebook.record.metrics import read_metrics
from tunebook.sweep.folder import SweepFolder, is_done
from tunebook.sweep.options import SHOWN_WHILE_RUNNING, Direction
from tunebook.sweep.results import Goal, TrialResult, read_result
from tunebook.sweep.space import Space, trial_of
from tunebook.sweep.trial_process import Watch
from tunebook.sweep.trials import Trial

STUDY_FILE = "study.jsonl"
_TRIAL_NUMBER = "trial"  # attribute of a study's trial with our trial number: to Optuna a repeated trial is a new one
_DIRECTIONS = {Direction.minimize: StudyDirection.MINIMIZE, Direction.maximize: StudyDirection.MAXIMIZE}
# Optuna's default: the first trials are never pruned, since there is no median of one or two.
NUM_NEVER_PRUNED = 5


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """The space, goal and size of a search."""

    fixed: list[str]  # overrides of every trial
    space: Space
    goal: Goal
    num_trials: int
    seed: int
    prune_from: int | None  # first step at which a trial may be ended early; None: no pruning
    is_direction_named: bool  # whether the user set the direction


def _pruner(first_step: int | None) -> BasePruner:
    if first_step is None:
        return NopPruner()
    return MedianPruner(n_startup_trials=NUM_NEVER_PRUNED, n_warmup_steps=first_step)


class Search:
    """One study and its trials; thread-safe."""

    def __init__(self, plan: SearchPlan, folder: SweepFolder) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder.path / STUDY_FILE
        # This process holds the sweep's folder, so the process that left this lock was killed.
        journal.with_name(f"{STUDY_FILE}.lock").unlink(missing_ok=True)
        self._plan, self._folder = plan, folder
        self._lock = threading.Lock()
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            study_name="sweep",
            direction=_DIRECTIONS[plan.goal.direction],
            pruner=_pruner(plan.prune_from),
            load_if_exists=True,
        )
        self._asked: dict[int, OptunaTrial] = {}
        self._again: list[Trial] = []
        self._trials = self._resume_open_trials()

    @property
    def trials(self) -> list[Trial]:
        """The trials proposed so far, in order."""
        with self._lock:
            return [self._trials[number] for number in sorted(self._trials)]

    def next_trial(self) -> Trial | None:
        """Return an interrupted trial or a new proposal; None if there are enough."""
        with self._lock:
            if self._again:
                trial = self._again.pop(0)
                self._study.enqueue_trial({key: self._value(key, text) for key, text in trial.swept.items()})
                self._ask(trial.number)
                return trial
            number = len(self._trials)
            if number >= self._plan.num_trials:
                return None
            self._trials[number] = trial_of(number, self._plan.fixed, self._ask(number).params)
            return self._trials[number]

    def tell(self, trial: Trial) -> None:
        """Report an ended trial to the study; a trial that was stopped with the sweep stays open."""
        end = self._folder.end_of(trial)
        if end is None or (end.was_interrupted and not end.was_pruned):
            return
        with self._lock:
            asked = self._asked.pop(trial.number)
            self._tell(trial, asked.number)

    def watch(self, trial: Trial) -> Watch | None:
        """Return a function that says whether a running trial is worse than the others' median at the same step."""
        key = SHOWN_WHILE_RUNNING.get(self._plan.goal.metric)
        if self._plan.prune_from is None or key is None:
            return None
        asked, last_step = self._asked[trial.number], -1

        def look() -> str | None:
            nonlocal last_step
            for line in read_metrics(self._folder.run_folder(trial)):
                value = line.get(key)
                if line["step"] <= last_step or value is None:
                    continue
                last_step = int(line["step"])
                with self._lock:
                    asked.report(float(value), last_step)
                    if asked.should_prune():
                        return f"at step {last_step}, {key} {value:.4g} is worse than the median of the trials before"
            return None

        return look

    def _ask(self, number: int) -> OptunaTrial:
        self._study.sampler = TPESampler(seed=(self._plan.seed + number) % 2**32, constant_liar=True)
        asked = self._study.ask(self._plan.space)
        asked.set_user_attr(_TRIAL_NUMBER, number)
        self._asked[number] = asked
        return asked

    def _tell(self, trial: Trial, study_number: int) -> None:
        end = self._folder.end_of(trial)
        result = read_result(trial, self._folder.run_folder(trial), end)
        value = self._plan.goal.value_of(result)
        self._check_direction(result)
        if end is not None and end.was_pruned:
            self._study.tell(study_number, state=TrialState.PRUNED)
        elif value is None:
            self._study.tell(study_number, state=TrialState.FAIL)
        else:
            self._study.tell(study_number, value)

    def _check_direction(self, result: TrialResult) -> None:
        """Refuse to search in the wrong direction: only the first evaluation shows that a lower score is better."""
        goal = self._plan.goal
        is_opposite = goal.metric == "evaluation_score" and result.evaluation_score is not None
        if is_opposite and not result.is_higher_better and not self._plan.is_direction_named:
            raise RequestError(
                "--metric=evaluation_score: the tasks of this evaluation are better when lower, and the search would "
                "take the highest; add --direction=minimize",
                problem_id="sweep-metric",
            )

    def _resume_open_trials(self) -> dict[int, Trial]:
        """Return an earlier sweep's trials by number; report the open ones that are done, and queue the rest again."""
        newest: dict[int, FrozenTrial] = {}
        for entry in self._study.get_trials(deepcopy=False):
            if _TRIAL_NUMBER in entry.user_attrs:
                newest[entry.user_attrs[_TRIAL_NUMBER]] = entry
        trials = {number: trial_of(number, self._plan.fixed, entry.params) for number, entry in newest.items()}
        for number, trial in sorted(trials.items()):
            end = self._folder.end_of(trial)
            if newest[number].state is TrialState.RUNNING and is_done(end):  # killed before it could be reported
                self._tell(trial, newest[number].number)
            elif not is_done(end):
                self._again.append(trial)
        for entry in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)):
            study_number = entry.number
            if entry.state is TrialState.WAITING:  # killed between two lines of next_trial
                study_number = self._study.ask(self._plan.space).number
            self._study.tell(study_number, state=TrialState.FAIL)
        return trials

    def _value(self, key: str, text: str) -> Any:
        """Return the value of an override as Optuna stores it."""
        distribution = self._plan.space[key]
        if isinstance(distribution, optuna.distributions.CategoricalDistribution):
            return text
        return int(text) if isinstance(distribution, optuna.distributions.IntDistribution) else float(text)
