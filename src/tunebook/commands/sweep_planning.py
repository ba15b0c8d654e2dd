"""Plan a sweep before it starts: its trials or its search, checked like `tunebook train`, and how they are launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.commands.sweep_dividing import Division, TrialDrafts, divide
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.hardware.detect import detect_machine
from tunebook.plan.auto.decisions import asked_keys
from tunebook.plan.draft import Draft
from tunebook.slurm import check_job
from tunebook.sweep.options import METRICS, SHOWN_WHILE_RUNNING, SweepOptions
from tunebook.sweep.results import Goal
from tunebook.sweep.shares import num_at_once, uses_this_machine
from tunebook.sweep.slurm_trials import check_jobs, split_overrides
from tunebook.sweep.trial_process import train_command
from tunebook.sweep.trials import Trial, check_trials, expand_trials, without_resume_override

if TYPE_CHECKING:  # loading Optuna takes a moment that lists need not wait
    from tunebook.sweep.space import Space

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that has passed every check."""

    recipe: str | None
    words: list[str]  # the overrides that are composed
    recipes_dirs: list[Path]
    options: SweepOptions
    trials: list[Trial]  # all trials of a list; the range ends of a search
    configs: list[RunConfig]  # of the trials
    fixed: list[str]  # of a search: overrides of all trials
    space: Space | None  # None: a list
    goal: Goal | None  # None: ranked by a metric that all have
    num_at_once: int
    drafts: TrialDrafts
    division: Division | None  # None: every trial sets its number of GPUs

    @property
    def num_trials(self) -> int:
        """The total number of trials."""
        return len(self.trials) if self.space is None else self.options.num_trials or 0

    @property
    def asked(self) -> frozenset[str]:
        """The keys of the first trial that the user set."""
        resolution = self.drafts.divided(self.trials[0].overrides, self.division).resolution
        return asked_keys(resolution.choices) if resolution is not None else frozenset()

    def config_of(self, trial: Trial) -> RunConfig:
        """Return a trial's configuration. Raises: RequestError if its values together break a rule."""
        draft = self.drafts.divided(trial.overrides, self.division)
        draft.raise_errors()
        return draft.config

    def too_large(self) -> dict[str, list[str]]:
        """Return why trials of the list will end with exit code 3 (too large by estimate), and the trials of each."""
        found: dict[str, list[str]] = {}
        for trial in self.trials if self.space is None else []:
            try:
                self.drafts.divided(trial.overrides, self.division).raise_if_too_large()
            except DoesNotFitError as error:
                found.setdefault(error.message, []).append(trial.name)
        return found

    def command(self, trial: Trial, run_folder: Path) -> list[str]:
        """Return the command that trains a trial where it runs."""
        overrides = list(trial.overrides)
        if self.config_of(trial).training.resume == "never":
            # `never` is about the sweep: in a trial's folder, Slurm's next turn or the same command resumes.
            overrides = [*without_resume_override(overrides), "training.resume=auto"]
        if self.options.launcher == "slurm":
            overrides = split_overrides(overrides)[1]
        return train_command(self.recipe, overrides, run_folder, self.recipes_dirs)

    def search_record(self) -> dict[str, Any] | None:
        """Return the search as JSON; sweeps with equal records resume each other's trials."""
        if self.space is None or self.goal is None:
            return None
        from tunebook.sweep.space import describe

        return {
            "search": self.options.search,
            "space": describe(self.space),
            "metric": self.goal.metric,
            "direction": self.goal.direction,
            "seed": self.options.seed or 0,
            "prune": self.options.prune,
        }

    def describe(self) -> str:
        """Describe in a line or two how the sweep will run."""
        at_once = "one at a time" if self.num_at_once == 1 else f"{self.num_at_once} at a time"
        how = {
            "basic": at_once,
            "joblib": f"{at_once}, {self._shares}",
            "slurm": f"as Slurm jobs, {at_once}",
        }[self.options.launcher]
        if self.goal is None or self.space is None:
            return how
        return f"{how}; searched by Optuna: {self.goal.direction} {self.goal.metric}, seed {self.options.seed or 0}"

    @property
    def _shares(self) -> str:
        """Describe the hardware of parallel trials."""
        if self.division is None:
            return "each on GPUs or cores of its own"
        num_gpus, jobs = self.division.num_gpus, self.options.jobs or 0
        sizes = " or ".join(map(str, sorted({config.hardware.gpus_per_node or 1 for config in self.configs})))
        waiting = f"; of --jobs={jobs} the others wait for one" if min(jobs, self.num_trials) > num_gpus else ""
        left = num_gpus - self.division.num_at_once * self.division.gpus_per_trial
        idle = f", {left} of which stay{'s' * (left == 1)} idle" if left and sizes.isdigit() else ""
        return f"each on {sizes} of the {num_gpus} GPUs found here{idle} (or hardware.gpus_per_node=N){waiting}"


def plan_sweep(
    recipe: str | None,
    words: list[str],
    recipes_dirs: list[Path],
    options: SweepOptions,
    *,
    is_started: bool,
    progress: Progress | None = None,
) -> SweepPlan:
    """Compose and check every trial. Raises: RequestError with what to type, before anything is written.

    `progress` gets the number of trials composed so far, and their total.
    """
    if options.launcher == "slurm":
        words = split_overrides(words)[0]
    fixed: list[str] = []
    space: Space | None = None
    if options.search is None:
        trials = expand_trials(words)
    else:
        from tunebook.sweep.space import corners, read_space

        fixed, space = read_space(words)
        trials = corners(fixed, space)
    num_trials = len(trials) if space is None else options.num_trials or 0
    drafts = TrialDrafts(recipe=recipe, recipes_dirs=recipes_dirs, machine=detect_machine())
    for number, trial in enumerate(trials, 1):
        drafts.whole(trial.overrides)
        if progress is not None:
            progress(number, len(trials))
    # A search may get more trials later, which must not change the GPUs of the first ones.
    division = divide(drafts, trials, options, num_trials if space is None else None)
    configs: list[RunConfig] = []
    try:
        check_trials(
            trials, lambda words: configs.append(_checked(drafts.divided(words, division), options, is_started))
        )
    except RequestError as error:
        raise (_with_whole_numbers(error, space) if space else error) from error
    if options.launcher == "slurm" and is_started:
        check_job(configs[0])
    return SweepPlan(
        recipe=recipe,
        words=words,
        recipes_dirs=recipes_dirs,
        options=options,
        trials=trials,
        configs=configs,
        fixed=fixed,
        space=space,
        goal=_goal(options, configs[0]),
        num_at_once=num_at_once(options, configs, num_trials, division.num_at_once if division else None),
        drafts=drafts,
        division=division,
    )


def _with_whole_numbers(error: RequestError, space: Space) -> RequestError:
    """Return the same error, with a hint if a search proposes fractions for an integer key."""
    from optuna.distributions import FloatDistribution

    wrong = [
        f"{key}=int(interval({distribution.low:g},{distribution.high:g}))"
        for key, distribution in space.items()
        if isinstance(distribution, FloatDistribution)
        and re.search(rf"{re.escape(key)}=\S+ is not a whole", error.message)
    ]
    if not wrong:
        return error
    return RequestError(f"{error.message}\nto search whole numbers: {' '.join(wrong)}", problem_id="sweep-range")


def _checked(draft: Draft, options: SweepOptions, is_started: bool) -> RunConfig:
    """Return one trial's configuration; to start it, this machine and image must be able to run it."""
    draft.raise_errors()
    resolution = draft.resolved
    if is_started and resolution.problem is not None:
        raise RequestError(resolution.why_not_runnable, problem_id=resolution.problem.id)
    check_launch(resolution.config, options)
    draft.raise_if_data_is_missing()
    return resolution.config


def check_launch(config: RunConfig, options: SweepOptions) -> None:
    """Refuse trials whose end the sweep would not see. Raises: RequestError."""
    if options.launcher == "slurm":
        check_jobs(config)
    elif isinstance(config.launcher, SlurmConfig) and not config.launcher.wait:
        raise RequestError(
            "launcher=slurm: a trial would end when its job is submitted, and the sweep before anything is trained; "
            "let the sweep submit its trials: --launcher=slurm, or let each trial wait for its job: launcher.wait=true",
            problem_id="sweep-option",
        )
    elif uses_this_machine(config) and config.hardware.num_nodes > 1:
        raise RequestError(
            f"hardware.num_nodes={config.hardware.num_nodes}: launcher=local on several nodes waits for a command on "
            "each of them, for every trial; use launcher=slurm launcher.wait=true or launcher=ray, or "
            "hardware.num_nodes=1",
            problem_id="sweep-option",
        )


def _goal(options: SweepOptions, config: RunConfig) -> Goal | None:
    """Return the goal of the search or ranking. Raises: RequestError for a metric that no trial will measure."""
    if options.metric is None and options.search is None:
        return None
    measured = _measured(config)
    metric = options.metric or measured[0]
    if metric not in measured:
        how = {
            "validation_loss": "hold some documents out: dataset.validation_share=0.05",
            "evaluation_score": "choose an evaluation, such as evaluation=quickstart, with evaluation.after=true",
        }[metric]
        others = ", ".join(f"--metric={name}" for name in measured)
        raise RequestError(
            f"--metric={metric}: no trial of this sweep measures it; {how}; or type one of {others}",
            problem_id="sweep-metric",
        )
    if options.prune and metric not in SHOWN_WHILE_RUNNING:
        raise RequestError(
            f"--prune: a running trial does not show its {metric} yet; type --metric=final_loss, or leave --prune out",
            problem_id="sweep-option",
        )
    return Goal(metric=metric, direction=options.direction or METRICS[metric])


def _measured(config: RunConfig) -> list[str]:
    """Return the metrics that a run of this configuration produces, most informative first."""
    missing = set()
    data = config.dataset
    if not (data.validation_split or data.validation_path or data.validation_share > 0):
        missing.add("validation_loss")
    if not (config.evaluation.tasks and config.evaluation.after):
        missing.add("evaluation_score")
    return [name for name in METRICS if name not in missing]
