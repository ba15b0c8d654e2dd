"""`tunebook fetch`: bring what a later run or evaluation reads onto this machine, so that it needs no network then.

Of a recipe that is its model with its tokenizer, its data sets and what its tasks need; of tasks the latter only.
Everything goes where the libraries look for it: HF_HOME, and nltk's data into Tunebook's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tunebook.config.choices import Source
from tunebook.config.schema import DatasetSource, RunConfig
from tunebook.errors import DoesNotFitError, RequestError, TunebookError
from tunebook.evaluate.needs import nltk_data
from tunebook.evaluate.needs.check import Hub, leaves_of, listed, missing_data, missing_nltk
from tunebook.evaluate.needs.data_sets import DataSet
from tunebook.evaluate.needs.modules import missing_packages
from tunebook.evaluate.task_files import check_tasks, resolve_task
from tunebook.model.hub import is_out_of_reach, local_problem

Say = Callable[[str], None]


def fetch_tasks(tasks: Iterable[str], say: Say) -> list[str]:
    """Fetch the data sets and nltk's data of tasks; what could not be had, in words, is returned.

    Raises: RequestError for a task that there is not.
    """
    tasks = list(tasks)
    check_tasks(tasks)
    leaves = [leaf for task in tasks for leaf in leaves_of(resolve_task(task))]
    problems, refused = [], dict[str, list[str]]()
    hub = Hub()  # asked first: the library would try for half a minute, for each data set
    for data in missing_data(leaves):
        why = hub.refusal(data.path) if data.is_on_the_hub else None
        if why is not None:
            refused.setdefault(why, []).append(data.label)
        else:
            problems += _done(f"data set {data.label}", partial(_load, data), say)
    problems += [
        f"{listed(labels, 'the data set', 'the data sets')} not here, and {why}" for why, labels in refused.items()
    ]
    for needed in missing_nltk(leaves):
        problems += _done(needed.label, partial(nltk_data.download, needed), say)
    packages = sorted({package for leaf in leaves for package in missing_packages(leaf)})
    if packages:
        problems.append(f"Python packages are never installed by this; type: pip install {' '.join(packages)}")
    return problems


def fetch_run(config: RunConfig, say: Say) -> list[str]:
    """Fetch what a training of this configuration reads, and what its evaluation does."""
    problems = []
    if config.model.name is not None:
        problems += _done(f"model {config.model.name}", partial(_fetch_model, config), say)
    for source in _sources(config):
        problems += _done(f"data set {source.name}", partial(_fetch_data_set, source), say)
    return problems + fetch_tasks(config.evaluation.tasks, say)


def require_fetched(problems: list[str]) -> None:
    """Raises: RequestError with everything that could not be had."""
    if problems:
        raise RequestError(
            "\n".join(["not everything could be fetched:", *(f"  {problem}" for problem in problems)]),
            problem_id="not-fetched",
        )


def _done(label: str, fetch: Callable[[], object], say: Say) -> list[str]:
    say(f"fetching {label}")
    try:
        fetch()
    except DoesNotFitError:  # there is no room for what comes after it either
        raise
    except TunebookError as error:
        return [error.message if error.message.startswith(label) else f"{label}: {error.message}"]
    return []


def _load(data: DataSet) -> None:
    """Have the library download a data set and make what it reads offline. Raises: RequestError."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(data.path, data.subset, **data.options)
        builder.download_and_prepare()
    except Exception as error:  # the library's own, the hub's, and whatever reading a broken file raises
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
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        raise _problem(error, source.name) from error


def _problem(error: BaseException, name: str) -> TunebookError:
    """Why a data set could not be had."""
    if problem := local_problem(error, f"the data set {name}"):
        return problem
    if is_out_of_reach(error):
        return RequestError(
            "the hub is out of reach; type the same where there is a network, and bring HF_HOME from there",
            problem_id="not-fetched",
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RequestError(
        f"{reason}; if it is gated, ask for access on its page on the hub and type `hf auth login`",
        problem_id="not-fetched",
    )


def _sources(config: RunConfig) -> list[DatasetSource]:
    """The data sets on the hub that a training reads."""
    parts = list(config.dataset.parts.values()) if config.dataset.source is Source.mixture else [config.dataset]
    return [part for part in parts if part.source is Source.hub and part.name is not None]
