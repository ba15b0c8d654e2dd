"""`tunebook fetch`: download what a later run or evaluation reads, so that it needs no network.

For a recipe: its model, tokenizer, data sets and the data of its tasks. For tasks: only their data. Downloads go where
the libraries look for them: HF_HOME, and Tunebook's cache for nltk's data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tunebook.config.choices import Source
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.schema import DatasetSource, RunConfig
from tunebook.errors import DoesNotFitError, RequestError, TunebookError, first_line
from tunebook.evaluate.preflight import Hub, describe_missing, download_nltk_package, find_missing
from tunebook.evaluate.task_files import check_tasks, refuse_suite_and_tasks, suite_settings
from tunebook.model.hub import is_out_of_reach, local_problem
from tunebook.terminal import print_text

if TYPE_CHECKING:
    from tunebook.evaluate.task_requirements import DataSet

Say = Callable[[str], None]


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

    def say(line: str) -> None:
        print_text(line, console)

    refuse_suite_and_tasks(suite, tasks)
    is_run = recipe is not None or bool(overrides)
    if not is_run and suite is None and not tasks:
        raise RequestError(
            "nothing is named to fetch; type a recipe (its model, data and tasks), suite=leaderboard, or "
            "tasks=gsm8k,arc_easy",
            problem_id="nothing-to-fetch",
        )
    config = compose(recipe, overrides, recipes_dirs).config if is_run else plain_config()
    asked = tasks or (suite_settings(suite, config).tasks if suite else [])
    problems = [*(_fetch_run(config, say) if is_run else []), *(fetch_tasks(asked, say) if asked else [])]
    if problems:
        raise RequestError(
            "\n".join(["not everything could be fetched:", *(f"  {problem}" for problem in problems)]),
            problem_id="not-fetched",
        )
    say("everything is here")


def fetch_tasks(tasks: Iterable[str], say: Say) -> list[str]:
    """Fetch the data sets and nltk data of tasks; return descriptions of what could not be fetched.

    Raises: RequestError for an unknown task, DoesNotFitError.
    """
    tasks = list(tasks)
    check_tasks(tasks)
    return describe_missing(find_missing(tasks, _FetchingHub(say)))


class _FetchingHub(Hub):
    """Downloads what it can; the rest stays missing."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say
        self._problems: dict[DataSet, str | None] = {}

    def refusal(self, data: DataSet) -> str | None:
        """Download a data set; return why that failed. Asks the hub first: the library retries for half a minute."""
        if data not in self._problems:
            problem = super().refusal(data) or _attempt(f"data set {data.label}", partial(_load, data), self._say)
            self._problems[data] = problem
        return self._problems[data]

    def nltk_refusal(self, package: str) -> str | None:
        """Download nltk data; return why that failed."""
        return _attempt(f"nltk data {package}", partial(download_nltk_package, package), self._say)


def _fetch_run(config: RunConfig, say: Say) -> list[str]:
    """Fetch what a training with this configuration reads, and what its evaluation needs."""
    downloads: dict[str, Callable[[], object]] = {}
    if config.model.name is not None:
        downloads[f"model {config.model.name}"] = partial(_fetch_model, config)
    is_mixture = config.dataset.source is Source.mixture
    for source in config.dataset.parts.values() if is_mixture else [config.dataset]:
        if source.source is Source.hub and source.name is not None:
            downloads[f"data set {source.name}"] = partial(_fetch_data_set, source)
    problems = {label: _attempt(label, download, say) for label, download in downloads.items()}
    return [
        *(f"{label}: {problem}" for label, problem in problems.items() if problem is not None),
        *fetch_tasks(config.evaluation.tasks, say),
    ]


def _attempt(label: str, fetch: Callable[[], object], say: Say) -> str | None:
    """Fetch one thing; return why it failed. Raises: DoesNotFitError, because nothing after it would fit."""
    say(f"fetching {label}")
    try:
        fetch()
    except DoesNotFitError:
        raise
    except TunebookError as error:
        return error.message
    return None


def _load(data: DataSet) -> None:
    """Download a data set and prepare it for offline use. Raises: RequestError."""
    import datasets

    try:
        datasets.load_dataset_builder(data.path, data.subset, **data.options).download_and_prepare()
    except Exception as error:  # errors of the library, of the hub, and of reading a broken file
        raise _problem(error, data.label) from error


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
        raise _problem(error, source.name) from error


def _problem(error: BaseException, name: str) -> TunebookError:
    """Return the error that says why a data set could not be fetched."""
    if problem := local_problem(error, f"the data set {name}"):
        return problem
    if is_out_of_reach(error):
        return RequestError(
            "the hub is out of reach; type the same where there is a network, and bring HF_HOME from there",
            problem_id="not-fetched",
        )
    reason = first_line(error)
    return RequestError(
        f"{reason}; if it is gated, ask for access on its page on the hub and type `hf auth login`",
        problem_id="not-fetched",
    )
