"""`tunebook fetch`: download what a later run or evaluation reads, so that it needs no network.

For a recipe: its model, tokenizer, data sets and the data of its tasks. For tasks: only their data. They are fetched by
loading them in a separate process. A training does the same first, so that a task that cannot be loaded is refused
before a GPU is used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from rich.console import Console

from tunebook.config.choices import Source
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.schema import DatasetSource, RunConfig
from tunebook.errors import DoesNotFitError, RequestError, TunebookError, first_line
from tunebook.evaluate.harness import loaded_without_model, prepare_environment
from tunebook.evaluate.task_files import check_tasks, refuse_suite_and_tasks, resolve_task, suite_settings
from tunebook.model.hub import disk_problem
from tunebook.terminal import print_text, quiet_libraries


def fetch_command(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    suite: str | None,
    tasks: list[str] | None,
) -> None:
    """Fetch what a recipe with its overrides reads, or what a suite or tasks need.

    Raises: RequestError for an unknown name, or one that lists everything that could not be fetched.
    """
    refuse_suite_and_tasks(suite, tasks)
    is_run = recipe is not None or bool(overrides)
    if not is_run and suite is None and not tasks:
        raise RequestError(
            "nothing is named to fetch; type a recipe (its model, data and tasks), suite=leaderboard, or "
            "tasks=gsm8k,arc_easy",
            problem_id="nothing-to-fetch",
        )
    config = compose(recipe, overrides, recipes_dirs).config if is_run else plain_config()
    asked = [*(tasks or (suite_settings(suite, config).tasks if suite else [])), *config.evaluation.tasks]
    check_tasks(asked)
    problems = []
    for label, download in _downloads(config).items():
        print_text(f"fetching {label}", console)
        try:
            download()
        except DoesNotFitError:  # nothing after it would fit
            raise
        except TunebookError as error:
            problems.append(error.message)
    if problems := [*problems, *load_problems(asked)]:
        raise RequestError("\n  ".join(["not everything could be fetched:", *problems]), problem_id="not-fetched")
    print_text("everything is here", console)


def require_tasks(tasks: Iterable[str]) -> None:
    """Load tasks with their data, and refuse those that cannot be, all in one error. Raises: RequestError."""
    if problems := load_problems(tasks):
        raise RequestError("\n".join(problems), problem_id="task-data-missing")


def load_problems(tasks: Iterable[str]) -> list[str]:
    """Load tasks with their data, which downloads it; return a line for each that cannot be loaded.

    In a process of its own: the libraries are set up for the harness when they are imported.
    """
    asked = [task for task in dict.fromkeys(tasks) if not resolve_task(task).has_own_data]
    if not asked:
        return []
    done = subprocess.run([sys.executable, "-m", __name__, *asked], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise TunebookError("the tasks could not be loaded; the message is above", problem_id="evaluation-failed")
    return done.stdout.splitlines()


def main() -> None:
    """Load the tasks that the command line names; print the problem of each that cannot be loaded."""
    problems = []
    with quiet_libraries(), redirect_stdout(sys.stderr):  # a task's own code may print
        prepare_environment(is_offline=False)
        for name in sys.argv[1:]:
            print(f"loading the task {name}")
            try:
                with loaded_without_model([resolve_task(name)]):
                    pass
            except TunebookError as error:
                problems.append(error.message.replace("\n", " "))
    print("\n".join(problems), end="")


def _downloads(config: RunConfig) -> dict[str, Callable[[], object]]:
    """What a training with this configuration reads, by its name in messages."""
    downloads: dict[str, Callable[[], object]] = {}
    if config.model.name is not None:
        downloads[f"model {config.model.name}"] = partial(_fetch_model, config)
    is_mixture = config.dataset.source is Source.mixture
    for source in config.dataset.parts.values() if is_mixture else [config.dataset]:
        if source.source is Source.hub and source.name is not None:
            downloads[f"data set {source.name}"] = partial(_fetch_data_set, source)
    return downloads


def _fetch_model(config: RunConfig) -> None:
    from tunebook.model.hub import fetch_config, fetch_weights
    from tunebook.model.tokenizer_files import tokenizer_folder

    fetch_config(config.model)
    tokenizer_folder(config.model)
    fetch_weights(config.model)


def _fetch_data_set(source: DatasetSource) -> None:
    from huggingface_hub import snapshot_download

    assert source.name is not None
    try:
        snapshot_download(source.name, repo_type="dataset", revision=source.revision)
    except (OSError, ValueError) as error:  # the hub's errors are subclasses of these
        raise disk_problem(error, f"the data set {source.name}") or RequestError(
            f"the data set {source.name} cannot be fetched: {first_line(error)}. Without a network, type the same "
            "where there is one, and bring HF_HOME from there. For a gated one, ask for access on its page on the hub, "
            "and type `hf auth login`",
            problem_id="not-fetched",
        ) from error


if __name__ == "__main__":
    main()
