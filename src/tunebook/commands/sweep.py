"""`tunebook sweep`: list or propose the trials, check them, run each in its own folder, rank them.

Exit code: 0 if every trial finished or was pruned, otherwise that of the first trial (in the order of the sweep) that
did not finish; 6 if the sweep was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tunebook.checkpoint.choose import same_command
from tunebook.commands.sweep_planning import SweepPlan, plan_sweep
from tunebook.config.identity import hash_anywhere
from tunebook.errors import RequestError
from tunebook.plan.show import preparing
from tunebook.record.run_folder import WITHOUT_RECIPE
from tunebook.sweep.folder import Request, SweepFolder, create, newest_with, working_on
from tunebook.sweep.launching import CommandOf, RunLocally, Runner, TrialList, run_trials
from tunebook.sweep.options import SweepOptions, check_options
from tunebook.sweep.results import (
    Ranking,
    TrialResult,
    best_line,
    rank,
    read_result,
    sweep_exit_code,
    sweep_table,
    trial_table,
    write_csv,
)
from tunebook.sweep.shares import machine_shares
from tunebook.sweep.slurm_trials import RunInSlurm
from tunebook.sweep.trial_process import EXIT_STOPPED, Stopping, TrialEnd, wait_until_free
from tunebook.sweep.trials import Trial, without_resume_override
from tunebook.terminal import print_text

CSV_FILE = "sweep.csv"
_MANY = 50  # trials: from this number on, checking takes seconds


def sweep_command(
    recipe: str | None,
    words: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    options: SweepOptions | None = None,
    dry_run: bool = False,
    command_of: CommandOf | None = None,
) -> int:
    """Run a sweep, print the ranked table and write `sweep.csv`; return the exit code.

    Raises: RequestError, before anything runs, if any trial would be refused.
    """
    options = options or SweepOptions()
    check_options(options)
    with preparing(console) as show:

        def progress(done: int, total: int) -> None:
            if total >= _MANY:
                show(done, total, f"checking {total} trials")

        plan = plan_sweep(recipe, words, recipes_dirs, options, is_started=not dry_run, progress=progress)
    if dry_run:
        console.print(trial_table(plan.trials, plan.space))
        print_text(plan.describe(), console)
        for why, names in plan.too_large().items():
            print_text(f"warning: {', '.join(names)}: {why}", console, style="yellow")
        return 0
    stopping = Stopping()
    with _locked_sweep(plan, console) as (folder, source), stopping.listening():
        if options.launcher != "slurm":
            _wait_for_leftovers(folder, source.trials, console)
        run_one = _runner(plan, folder, stopping, command_of or plan.command)
        run_trials(source, run_one, stopping, plan.num_at_once, folder.has_filled_disk)
        return _conclude(plan, folder, source.trials, console, was_stopped=stopping.num_requests > 0)


@contextmanager
def _locked_sweep(plan: SweepPlan, console: Console) -> Iterator[tuple[SweepFolder, TrialList]]:
    """Lock the folder of an interrupted sweep with an equal request, or a new one; yield it and the trials to run."""
    config = plan.configs[0]
    request = Request(
        recipe=plan.recipe,
        overrides=without_resume_override(plan.words),
        config_sha256=hash_anywhere(config, plan.asked),
        search=plan.search_record(),
        gpus_per_trial=plan.division.gpus_per_trial if plan.division else None,
    )
    outputs, recipe = Path(config.outputs), plan.recipe or WITHOUT_RECIPE
    earlier = newest_with(request, outputs, recipe) if config.training.resume != "never" else None
    if earlier is not None:
        with working_on(earlier):
            source = _source(plan, earlier)
            num_done = sum(earlier.is_done(trial) for trial in source.trials)
            if num_done < plan.num_trials:
                notice = f"resuming the sweep in {earlier.path}: {num_done} of {plan.num_trials} trials are done"
                notice += f"; to start over: training.resume=never\n{plan.describe()}"
                print_text(notice, console)
                yield earlier, source
                return
    folder = create(request, outputs, recipe)
    with working_on(folder):
        print_text(f"sweep of {plan.num_trials} trials: {folder.path}\n{plan.describe()}", console)
        yield folder, _source(plan, folder)


def _source(plan: SweepPlan, folder: SweepFolder) -> TrialList:
    if plan.space is None or plan.goal is None:
        return TrialList(plan.trials, folder)
    from tunebook.sweep.study import Search

    return Search(plan.fixed, plan.space, plan.goal, plan.options, folder)


def _wait_for_leftovers(folder: SweepFolder, trials: list[Trial], console: Console) -> None:
    """Wait for processes of trials of a killed sweep: they save and end, and their GPUs are not free until then."""
    for trial in trials:
        run_folder = folder.run_folder(trial)

        def say(name: str = trial.name) -> None:
            console.print(f"waiting for {name}, which still saves")

        if not wait_until_free(run_folder, say):
            raise RequestError(
                f"{run_folder} is still running on resources that this sweep needs; end it, or start another: "
                "training.resume=never",
                problem_id="sweep-is-running",
            )


def _runner(plan: SweepPlan, folder: SweepFolder, stopping: Stopping, command_of: CommandOf) -> Runner:
    common: dict[str, Any] = {
        "folder": folder,
        "command_of": command_of,
        "config_of": plan.config_of,
        "stopping": stopping,
        "num_trials": plan.num_trials,
    }
    if plan.options.launcher == "slurm":
        return RunInSlurm(**common)
    return RunLocally(**common, shares=machine_shares(plan.num_at_once), prints_to_files=plan.num_at_once > 1)


def _conclude(plan: SweepPlan, folder: SweepFolder, trials: list[Trial], console: Console, *, was_stopped: bool) -> int:
    """Write and print the results of the trials; return the exit code."""
    ends = [folder.end_of(trial) for trial in trials]
    results = [read_result(trial, folder.run_folder(trial), end) for trial, end in zip(trials, ends, strict=True)]
    if results:
        ranking = rank(results, plan.goal)
        write_csv(ranking, folder.path / CSV_FILE)
        console.print(sweep_table(ranking))
        if ranking.ranked:
            print_text(best_line(plan.recipe, ranking.ranked[0], plan.recipes_dirs), console)
        print_text(f"written: {folder.path / CSV_FILE}", console)
    again = same_command(plan.configs[0])
    if was_stopped and (len(trials) < plan.num_trials or any(map(_was_cut_short, ends))):
        console.print(f"stopped; {again} resumes it")
        return EXIT_STOPPED
    if any(folder.has_filled_disk(trial) for trial in trials):
        console.print(f"no further trials were started, since the disk is full; free some space; {again} resumes it")
    elif num_left := sum(not folder.is_done(trial) for trial in trials):
        console.print(f"{again} tries {num_left} of {plan.num_trials} trials again")
    _require_metric(plan, ranking, results)
    return sweep_exit_code(results)


def _was_cut_short(end: TrialEnd | None) -> bool:
    """Whether a trial did not finish because its sweep or its job was stopped."""
    return end is None or ((end.was_interrupted or end.exit_code == EXIT_STOPPED) and not end.was_pruned)


def _require_metric(plan: SweepPlan, ranking: Ranking, results: list[TrialResult]) -> None:
    """Fail a search in which no trial measured the metric."""
    if plan.goal is None or ranking.ranked or not any(result.has_finished for result in results):
        return
    measured = [
        name for name in ("validation_loss", "final_loss") if any(getattr(r, name) is not None for r in results)
    ]
    instead = " or ".join(f"--metric={name}" for name in measured or ["seconds"])
    raise RequestError(
        f"--metric={plan.goal.metric}: no trial has it; type {instead}",
        problem_id="sweep-metric",
    )
