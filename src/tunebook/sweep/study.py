"""A search: ask Optuna for trials and report their results to it, through a journal in the sweep's folder.

Every proposal has its own seed (the search's plus the trial's number), so it depends only on the finished trials. An
interrupted search that runs one trial at a time therefore resumes with the same proposals. The sampler is TPE, Optuna's
default. Its `constant_liar` keeps parallel proposals apart.
"""

from __future__ import annotations

import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import Trial as OptunaTrial
from optuna.trial import TrialState

from tunebook.errors import RequestError
from tunebook.record.metrics import read_metrics
from tunebook.sweep.folder import SweepFolder
from tunebook.sweep.launching import TrialList
from tunebook.sweep.options import SHOWN_WHILE_RUNNING, SweepOptions
from tunebook.sweep.results import Goal, TrialResult, read_result
from tunebook.sweep.space import Space, trial_of
from tunebook.sweep.trial_process import TrialEnd, Watch
from tunebook.sweep.trials import Trial

STUDY_FILE = "study.jsonl"
_TRIAL_NUMBER = "trial"  # attribute of a study's trial with our trial number: to Optuna a repeated trial is a new one
# Optuna's default: the first trials are never pruned, since there is no median of one or two.
NUM_NEVER_PRUNED = 5


class Search(TrialList):
    """One study: the trials that it has proposed so far, and its further proposals. `fixed` are their overrides."""

    def __init__(self, fixed: list[str], space: Space, goal: Goal, options: SweepOptions, folder: SweepFolder) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder.path / STUDY_FILE
        # This process holds the sweep's folder, so the process that left this lock was killed.
        journal.with_name(f"{STUDY_FILE}.lock").unlink(missing_ok=True)
        self._fixed, self._space, self._goal, self._options, self._folder = fixed, space, goal, options, folder
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            study_name="sweep",
            direction=StudyDirection[goal.direction.upper()],
            pruner=MedianPruner(NUM_NEVER_PRUNED, n_warmup_steps=options.prune) if options.prune else NopPruner(),
            load_if_exists=True,
        )
        self._asked: dict[int, OptunaTrial] = {}
        self._earlier = {  # of an earlier sweep in this folder, the newest of each trial
            entry.user_attrs[_TRIAL_NUMBER]: entry
            for entry in self._study.get_trials(deepcopy=False)
            if _TRIAL_NUMBER in entry.user_attrs
        }
        super().__init__(
            [trial_of(number, fixed, self._earlier[number].params) for number in sorted(self._earlier)], folder
        )
        self._report_open_trials()

    def next_trial(self) -> Trial | None:
        """Return an interrupted trial or a new proposal; None if there are enough."""
        trial = super().next_trial()
        with self._lock:
            if trial is not None:
                self._study.enqueue_trial(self._earlier[trial.number].params)
                self._ask(trial.number)
                return trial
            number = len(self.trials)
            if number >= (self._options.num_trials or 0):
                return None
            self.trials.append(trial_of(number, self._fixed, self._ask(number).params))
            return self.trials[number]

    def tell(self, trial: Trial) -> None:
        """Report an ended trial to the study; a trial that was stopped with the sweep stays open."""
        end = self._folder.end_of(trial)
        if end is None or (end.was_interrupted and not end.was_pruned):
            return
        with self._lock:
            self._tell(trial, end, self._asked.pop(trial.number).number)

    def watch(self, trial: Trial) -> Watch | None:
        """Return a function that says whether a running trial is worse than the others' median at the same step."""
        if self._options.prune is None:
            return None
        key = SHOWN_WHILE_RUNNING[self._goal.metric]
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
        self._study.sampler = TPESampler(seed=((self._options.seed or 0) + number) % 2**32, constant_liar=True)
        asked = self._study.ask(self._space)
        asked.set_user_attr(_TRIAL_NUMBER, number)
        self._asked[number] = asked
        return asked

    def _tell(self, trial: Trial, end: TrialEnd, study_number: int) -> None:
        result = read_result(trial, self._folder.run_folder(trial), end)
        self._check_direction(result)
        value = self._goal.value_of(result)
        if end.was_pruned:
            self._study.tell(study_number, state=TrialState.PRUNED)
        elif value is None:
            self._study.tell(study_number, state=TrialState.FAIL)
        else:
            self._study.tell(study_number, value)

    def _check_direction(self, result: TrialResult) -> None:
        """Refuse to search in the wrong direction: only the first evaluation shows that a lower score is better."""
        is_low_better = result.evaluation_score is not None and not result.is_higher_better
        if self._goal.metric == "evaluation_score" and is_low_better and self._options.direction is None:
            raise RequestError(
                "--metric=evaluation_score: the tasks of this evaluation are better when lower, and the search would "
                "take the highest; add --direction=minimize",
                problem_id="sweep-metric",
            )

    def _report_open_trials(self) -> None:
        """Report the trials that an earlier sweep left open: by their end if they have one, else as failed."""
        for trial in self.trials:
            entry, end = self._earlier[trial.number], self._folder.end_of(trial)
            if entry.state is TrialState.RUNNING and end is not None and end.is_done:
                self._tell(trial, end, entry.number)
        for entry in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)):
            study_number = entry.number
            if entry.state is TrialState.WAITING:  # killed between two lines of next_trial
                study_number = self._study.ask(self._space).number
            self._study.tell(study_number, state=TrialState.FAIL)
