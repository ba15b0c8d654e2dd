"""`tunebook sweep`: check every trial, run each in its own folder, rank them.

Exit code: 0 if every trial finished or was pruned, otherwise that of the first trial that did not; 6 if the sweep was
stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tunebook.checkpoint.choose import same_command
from tunebook.config.choices import Generation, LauncherName
from tunebook.config.identity import config_hash
from tunebook.config.launchers import RayConfig
from tunebook.config.override_text import command_words, shell_command
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem, RequestError, StoppedError, TunebookError, first_few
from tunebook.facts.methods import VALIDATION_METRICS, method_facts
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.launch.slurm import check_job
from tunebook.launch.supervise import StopRequests
from tunebook.plan.draft import Draft, draft_run
from tunebook.plan.show import show_warnings
from tunebook.record.run_folder import LOCK_FILE, run_name, working_in
from tunebook.sweep.slurm import check_array, is_array, queued_array, submit_array
from tunebook.sweep.space import Values, read_space, title_of
from tunebook.sweep.study import RESUMES, Study, Sweep, find_folder, make_folder, write_sweep
from tunebook.sweep.table import (
    CSV_FILE,
    LOGGED_WHILE_RUNNING,
    METRICS,
    ranked,
    sweep_exit_code,
    sweep_table,
)
from tunebook.sweep.trials import CommandOf, divide, run_trials, train_command
from tunebook.terminal import print_text

_SAVES_WITHIN_S = 600.0  # trials of a killed sweep, which may hold large models
_NUM_TASKS = 8  # of an array at a time: a search learns from those that have ended
_MAX_EXAMPLES = 3  # trials named per problem; the others are counted


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options as typed; None if omitted."""

    jobs: int | None = None
    num_trials: int | None = None
    metric: str | None = None
    seed: int | None = None
    prune: int | None = None


def sweep_command(
    recipe: str | None,
    words: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    options: SweepOptions | None = None,
    dry_run: bool = False,
    command_of: CommandOf = train_command,
) -> int:
    """Run a sweep, print the ranked table and write `sweep.csv`; return the exit code.

    Raises: RequestError, before anything runs, if any trial would be refused.
    """
    options = options or SweepOptions()
    machine = detect_machine()
    sweep, config, warnings = plan_sweep(recipe, words, recipes_dirs, options, machine, is_started=not dry_run)
    show_warnings(warnings, console)
    if dry_run:
        grid = sweep.space.grid() if sweep.num_trials is None else []
        for number, values in enumerate(grid):
            print_text(f"trial-{number:03d}  {title_of(values)}", console)
        print_text(f"{sweep.num_trials or len(grid)} trials, {_how_it_runs(sweep, options)}", console)
        return 0
    outputs = Path(config.outputs).expanduser().absolute() / run_name(config)
    earlier = find_folder(sweep, outputs) if config.training.resume != "never" else None
    folder = earlier or make_folder(outputs)
    with working_in(folder):
        write_sweep(sweep, folder)
        study = Study(folder, sweep)
        study.enqueue_grid()
        print_text(f"{'resuming the sweep in' if earlier else 'sweep:'} {folder}", console)
        if sweep.is_array:
            return _submit(study, config, options, console)
        _reopen(study)
        print_text(f"{study.num_left} of {study.num_trials} trials to run, {_how_it_runs(sweep, options)}", console)
        jobs = options.jobs or 1
        gpus = [gpu.uuid or str(gpu.index) for gpu in machine.gpus]
        slots = divide(gpus, jobs) if _is_here(config) else [{}] * jobs
        stop = StopRequests()
        with stop.listening():
            run_trials(study, slots, stop, lambda text: print_text(text, console), command_of)
        return _conclude(study, config, console, was_stopped=stop.first is not None)


def plan_sweep(
    recipe: str | None,
    words: list[str],
    recipes_dirs: list[Path],
    options: SweepOptions,
    machine: Machine,
    *,
    is_started: bool,
) -> tuple[Sweep, RunConfig, list[Problem]]:
    """Check every trial of a grid, or the ends of every range of a search.

    Returns also the first one's configuration, and each warning once.
    Raises: RequestError that names the trials that cannot run, or says which option cannot be used.
    """
    if options.seed is not None and options.num_trials is None:
        raise RequestError(
            f"--seed={options.seed} is of a search: add --num-trials=20, or type training.seed={options.seed} for the "
            "trainings",
            problem_id="sweep-option",
        )
    space = read_space(words, is_search=options.num_trials is not None)
    trials = space.grid() if options.num_trials is None else space.corners()
    # Trials side by side see their share of the GPUs, so `auto` decides for that share.
    share = replace(machine, gpus=machine.gpus[: max(1, len(machine.gpus) // (options.jobs or 1))])
    drafts = [draft_run(recipe, space.overrides(values), recipes_dirs, share) for values in trials]
    _check_trials(trials, drafts, machine, options, is_started=is_started)
    configs = [draft.config for draft in drafts]
    sweep = Sweep(
        recipe=recipe,
        recipes_dirs=[str(folder.expanduser().absolute()) for folder in recipes_dirs],
        overrides=[RESUMES if word == "training.resume=never" else word for word in words],
        config_sha256=config_hash(configs[0]),
        num_trials=options.num_trials,
        metric=_metric(options, configs),
        seed=options.seed or 0,
        prune=options.prune,
        is_array=is_array(configs[0]),
    )
    if sweep.is_array:
        check_array(configs)
        if is_started:
            check_job(configs[0])
    warnings = {(problem.id, problem.key): problem for draft in drafts for problem in draft.problems}
    return sweep, configs[0], [*warnings.values()]


def _check_trials(
    trials: list[Values], drafts: list[Draft], machine: Machine, options: SweepOptions, *, is_started: bool
) -> None:
    """Raises: RequestError with the trials that cannot run, and the message of the first."""
    errors: dict[str, TunebookError] = {}
    for values, draft in zip(trials, drafts, strict=True):
        try:
            draft.raise_errors()
            if is_started:
                _check_start(draft, machine, options.jobs or 1)
        except TunebookError as error:
            errors[title_of(values)] = error
    if errors:
        first = next(iter(errors.values()))
        named = first_few([*errors], _MAX_EXAMPLES, "; ")
        raise RequestError(
            "this sweep cannot run, and none of its trials was started\n"
            f"{len(errors)} of {len(trials)} trials ({named}): {first.message}",
            problem_id=first.problem_id,
        )


def _check_start(draft: Draft, machine: Machine, jobs: int) -> None:
    """Check that this machine can run a trial. Raises: RequestError, DataError."""
    config, num_gpus = draft.config, draft.config.hardware.gpus_per_node or 1
    is_on_gpus = _is_here(config) and config.hardware.generation is not Generation.cpu
    if is_on_gpus and jobs > 1 and jobs * num_gpus > len(machine.gpus):
        raise RequestError(
            f"--jobs={jobs}: {jobs} trials on {num_gpus} GPUs each do not fit on the {len(machine.gpus)} GPUs here; "
            f"type --jobs={max(1, len(machine.gpus) // num_gpus)}, or fewer GPUs per trial: hardware.gpus_per_node=1",
            problem_id="sweep-jobs",
        )
    if draft.resolved.problem is not None:
        raise RequestError(draft.resolved.not_runnable_reason, problem_id=draft.resolved.problem.id)
    if draft.unusable_data is not None:
        raise draft.unusable_data


def _is_here(config: RunConfig) -> bool:
    """Whether a trial's ranks run on this machine."""
    if isinstance(config.launcher, RayConfig):
        return config.launcher.address == "local"
    return config.launcher.name is LauncherName.local


def _metric(options: SweepOptions, configs: list[RunConfig]) -> str:
    """Return what ranks the trials. Raises: RequestError for a metric that not every trial measures."""
    measured = [name for name in METRICS if all(_measures(config, name) for config in configs)]
    metric = options.metric or measured[0]
    if metric not in measured:
        raise RequestError(
            f"--metric={metric}: not every trial measures it; type one of {', '.join(measured)}, or hold documents out "
            "(dataset.validation_share=0.05), or choose an evaluation (evaluation=quickstart)",
            problem_id="sweep-metric",
        )
    is_loss = metric in LOGGED_WHILE_RUNNING
    if is_loss and options.metric is None and any(config.method != configs[0].method for config in configs):
        raise RequestError(
            f"trials with other settings of the method have other losses, so {metric} does not rank them; type "
            f"--metric={next(iter(VALIDATION_METRICS))}, with data held out (dataset.validation_share=0.05)",
            problem_id="sweep-metric",
        )
    if options.prune and not is_loss:
        raise RequestError(
            f"--prune: a running trial does not show its {metric} yet; add --metric=final_loss",
            problem_id="sweep-option",
        )
    return metric


def _measures(config: RunConfig, metric: str) -> bool:
    data = config.dataset
    if metric in VALIDATION_METRICS and metric.removeprefix("validation_") not in method_facts(config).metrics:
        return False
    if metric == "validation_loss" or metric in VALIDATION_METRICS:
        return bool(data.validation_split or data.validation_path or data.validation_share > 0)
    return metric != "evaluation_score" or bool(config.evaluation.tasks and config.evaluation.after)


def _reopen(study: Study) -> None:
    """Let the trials of an interrupted sweep run again, once the processes that it left have saved and ended."""
    for row in study.rows():
        folder = study.run_folder(row.number)
        if (folder / LOCK_FILE).is_file():
            with working_in(folder, _SAVES_WITHIN_S):
                pass
    study.reopen()


def _submit(study: Study, config: RunConfig, options: SweepOptions, console: Console) -> int:
    """Submit the trials that are left as an array, unless one is still queued; print the table so far."""
    job_id = queued_array(study.folder)
    if job_id is None:
        study.reopen()
        if study.num_left == 0:
            return _conclude(study, config, console, was_stopped=False)
        job_id = submit_array(study, config, options.jobs or _NUM_TASKS)
        print_text(f"submitted as job {job_id}: {study.num_left} of {study.num_trials} trials", console)
    else:
        _show(study, console)
    print_text(
        f"{same_command(config)} prints the table so far, and runs again what did not finish once job {job_id} has "
        f"ended; to stop it: scancel {job_id}",
        console,
    )
    return 0


def _conclude(study: Study, config: RunConfig, console: Console, *, was_stopped: bool) -> int:
    """Print the table and what remains; return the exit code."""
    _show(study, console)
    if was_stopped and study.num_open:
        print_text(f"stopped; {same_command(config)} resumes it", console)
        return StoppedError.exit_code
    if study.num_open:
        print_text(f"{same_command(config)} tries {study.num_open} of {study.num_trials} trials again", console)
    return sweep_exit_code(study.rows())


def _show(study: Study, console: Console) -> None:
    rows, sweep = study.rows(), study.sweep
    if not rows:
        return
    console.print(sweep_table(rows, sweep.metric))
    print_text(f"written: {study.folder / CSV_FILE}", console)
    rank, best = ranked(rows, sweep.metric)[0]
    if rank:
        overrides = sweep.space.overrides(best.values)
        words = command_words("train", sweep.recipe, overrides, map(Path, sweep.recipes_dirs))
        print_text(f"best: {best.name}, again: {shell_command(words)}", console)


def _how_it_runs(sweep: Sweep, options: SweepOptions) -> str:
    how = f"{options.jobs or 1} at a time"
    if sweep.is_array:
        how = f"as tasks of a Slurm job array, {options.jobs or _NUM_TASKS} at a time"
    if sweep.num_trials is None:
        return how
    keys = ", ".join(sweep.space.choices)
    return f"{how}, over {keys}, searched by Optuna for the best {sweep.metric}, seed {sweep.seed}"
