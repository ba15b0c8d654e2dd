"""Load tasks with their data before anything else: before a training, and for `tunebook fetch`.

Loading downloads, so that a later run or evaluation needs no network. `fetch` does the same for the model, tokenizer
and data sets of a recipe. A task that cannot be loaded is refused before a GPU is used.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console

from tunebook.config.choices import Source
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.data.prepare import require_image_model
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.harness import load_tasks, prepare_environment, read_conversations
from tunebook.evaluate.task_files import resolve_task, resolve_tasks, suite_settings
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

    Raises: RequestError for an unknown name, for what cannot be fetched, and for tasks that cannot be loaded.
    """
    is_run = recipe is not None or bool(overrides)
    if not is_run and suite is None and not tasks:
        raise RequestError(
            "nothing is named to fetch; type a recipe (its model, data and tasks), suite=leaderboard, or "
            "tasks=gsm8k,arc_easy",
            problem_id="nothing-to-fetch",
        )
    config = compose(recipe, overrides, recipes_dirs).config if is_run else plain_config()
    _fetch_run(config, console)
    named = [*(tasks or (suite_settings(suite).tasks if suite else [])), *config.evaluation.tasks]
    require_tasks(named, download_images=config.dataset.download_images)
    print_text("everything is here", console)


def _fetch_run(config: RunConfig, console: Console) -> None:
    """Download the model, tokenizer and data sets of a run. Raises: RequestError, DoesNotFitError for a full disk."""
    from huggingface_hub import snapshot_download

    from tunebook.model.hub import fetch_config, fetch_weights, hub_problem
    from tunebook.model.tokenizer_files import tokenizer_folder

    if config.model.name is not None:
        print_text(f"fetching model {config.model.name}", console)
        fetch_config(config.model)
        tokenizer_folder(config.model)
        fetch_weights(config.model)
    data = config.dataset
    for source in data.parts.values() if data.source is Source.mixture else [data]:
        if source.source is Source.hub and source.name is not None:
            print_text(f"fetching data set {source.name}", console)
            try:
                snapshot_download(source.name, repo_type="dataset", revision=source.revision)
            except (OSError, ValueError) as error:  # the hub's errors are subclasses of these
                raise hub_problem(
                    error, "data set", source.name, source.revision, key="dataset.name=null dataset.path"
                ) from error


def require_tasks(tasks: Iterable[str], *, download_images: bool = False, model: ModelConfig | None = None) -> None:
    """Load tasks with their data, which downloads it; refuse those that cannot be loaded, all in one error.

    In a process of its own: the libraries are set up for the harness when they are imported. Raises: RequestError, also
    for images that the model cannot read; DataError for held-out conversations that cannot be used.
    """
    names = [*tasks]
    resolved = dict(zip(names, resolve_tasks(names), strict=True))
    for held_out in filter(None, (task.conversations for task in resolved.values())):
        read = read_conversations(held_out, None, download_images=download_images)
        if model is not None and any(each.conversation.images() for each in read):
            require_image_model(model, f"the conversations of {held_out}")
    remote = [name for name, task in resolved.items() if not task.has_own_data]
    if not remote:
        return
    done = subprocess.run([sys.executable, "-m", __name__, *remote], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise TunebookError("the tasks could not be loaded; the message is above", problem_id="evaluation-failed")
    if done.stdout:
        raise RequestError(done.stdout, problem_id="task-data-missing")


def main() -> None:
    """Load the tasks that the command line names; print the problems of those that cannot be loaded."""
    problems = ""
    with quiet_libraries(), redirect_stdout(sys.stderr):  # a task's own code may print
        prepare_environment(is_offline=False)
        print(f"loading the tasks {', '.join(sys.argv[1:])}")
        try:
            with tempfile.TemporaryDirectory(prefix="tunebook-evaluation-") as cache:
                load_tasks([resolve_task(name) for name in sys.argv[1:]], Path(cache))
        except RequestError as error:
            problems = error.message
    print(problems, end="")


if __name__ == "__main__":
    main()
