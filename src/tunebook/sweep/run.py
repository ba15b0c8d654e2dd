"""What `tunebook sweep` does: list the trials, check them all, run each in its own folder, rank them.

Exit code: 0 when every trial finished, otherwise that of the first trial (in the order of the sweep) that did not; 6
when the sweep was stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.launch.job import plan_job
from tunebook.sweep.multirun import check_launcher, run_multirun, visible_to_hydra
from tunebook.sweep.results import rank, read_result, sweep_exit_code
from tunebook.sweep.table import sweep_table, write_csv
from tunebook.sweep.trial_process import EXIT_STOPPED, run_trial, train_command
from tunebook.sweep.trials import Trial, check_trials, expand_trials, split_launcher

CSV_FILE = "sweep.csv"
_WITHOUT_RECIPE = "custom"  # the folder of runs that name no recipe

CommandOf = Callable[[Trial, Path], list[str]]  # what to run for a trial, given its run folder


def sweep_command(
    recipe: str | None,
    words: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    dry_run: bool = False,
    command_of: CommandOf | None = None,
) -> int:
    """Run a sweep, print the ranked table and write `sweep.csv`; returns the exit code.

    Raises: RequestError, before anything runs, when any trial would be refused.
    """
    overrides, launcher = split_launcher(words)
    trials = expand_trials(overrides)
    configs: list[RunConfig] = []
    check_trials(trials, lambda trial: configs.append(_plan(recipe, trial, recipes_dirs, is_started=not dry_run)))
    check_launcher(recipe, trials[0], launcher, recipes_dirs)
    if dry_run:
        console.print(_trial_table(trials))
        return 0
    folder = _create_sweep_folder(Path(configs[0].outputs), recipe or _WITHOUT_RECIPE)
    console.print(Text(f"sweep of {len(trials)} trials: {folder}"), soft_wrap=True)
    command_of = command_of or (lambda trial, run_folder: train_command(recipe, trial, run_folder, recipes_dirs))
    was_stopped = False
    try:
        with _terminate_as_interrupt():
            visible = visible_to_hydra(overrides, trials[0])
            job = _job(trials, folder, command_of, is_parallel=bool(launcher))
            run_multirun(recipe, visible, launcher, recipes_dirs, folder, job)
    except KeyboardInterrupt:
        was_stopped = True
    results = [read_result(trial, folder / trial.name, _end_file(folder, trial)) for trial in trials]
    ranking = rank(results)
    write_csv(ranking, folder / CSV_FILE)
    console.print(sweep_table(ranking))
    console.print(Text(f"written: {folder / CSV_FILE}"), soft_wrap=True)
    return EXIT_STOPPED if was_stopped else sweep_exit_code(results)


def _plan(recipe: str | None, overrides: list[str], recipes_dirs: list[Path], *, is_started: bool) -> RunConfig:
    """One trial's configuration; where it is to be started, this must be the machine and the image for it."""
    job = plan_job(recipe, overrides, recipes_dirs)
    if is_started and job.resolution.problem is not None:
        raise RequestError(job.resolution.why_not_runnable, problem_id=job.resolution.problem.id)
    return job.config


def _job(trials: list[Trial], folder: Path, command_of: CommandOf, *, is_parallel: bool) -> Callable[[int], None]:
    """What Hydra calls for each trial; trials that may run side by side print to files of their own."""

    def job(number: int) -> None:
        trial = trials[number]
        print(f"\ntrial {number + 1} of {len(trials)}: {trial.title}", flush=True)
        run_folder = folder / trial.name
        output = folder / f"{trial.name}.log" if is_parallel else None
        run_trial(command_of(trial, run_folder), _end_file(folder, trial), output)

    return job


def _end_file(folder: Path, trial: Trial) -> Path:
    return folder / f"{trial.name}.json"


def _create_sweep_folder(outputs: Path, recipe: str) -> Path:
    """Make `outputs/<recipe>/sweep-<UTC time>[-NNN]/`. Raises: RequestError when it cannot be written to."""
    recipe_folder = outputs.expanduser().absolute() / recipe
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    try:
        recipe_folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = recipe_folder / (f"sweep-{time}" if number == 1 else f"sweep-{time}-{number:03d}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise RequestError(
            f"no sweep folder can be made in {recipe_folder}: {error.strerror}; make it writable, or write elsewhere: "
            "outputs=/a/folder/of/yours",
            problem_id="outputs-not-writable",
        ) from error
    raise AssertionError("there is always a next number")


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a sweep as Ctrl-C does: the running trial saves, and the table is written."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _trial_table(trials: list[Trial]) -> Table:
    table = Table(title=f"{len(trials)} trials")
    table.add_column("trial", justify="right")
    for key in trials[0].swept:
        table.add_column(key, justify="right", overflow="fold")
    for trial in trials:
        table.add_row(str(trial.number + 1), *trial.swept.values())
    return table
