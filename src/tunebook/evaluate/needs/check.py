"""Everything that tasks need and this machine lacks, found at once and before a model is loaded.

What a network would bring is no lack where there is one: data sets are then fetched by the harness, nltk's data here.
Access to gated data sets is asked for now too, and not after an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from tunebook.errors import RequestError
from tunebook.evaluate.needs import data_sets, nltk_data
from tunebook.evaluate.needs.data_sets import DataSet, data_set_of
from tunebook.evaluate.needs.leaf_tasks import LeafTask, leaf_tasks
from tunebook.evaluate.needs.modules import missing_packages
from tunebook.evaluate.needs.nltk_data import NltkData, nltk_data_of
from tunebook.evaluate.task_files import TaskFile, resolve_task
from tunebook.model.hub import is_out_of_reach
from tunebook.model.hub_token import token_problem

_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_OUT_OF_REACH = "the hub is out of reach"
_NUM_NAMED = 3  # parts of a group that a message names; the others are counted


@dataclass(frozen=True, kw_only=True)
class Lack:
    """What one task, as it was asked for, cannot be evaluated without."""

    task: str
    lacks: str  # what, and why it is not to be had, in words
    fix: str | None = None  # what to do instead of fetching it


class Hub:
    """Whether data sets can be fetched; asked once for each, and not again once nothing answers."""

    def __init__(self) -> None:
        self._refusals: dict[str, str | None] = {}
        self.is_reached = not any(
            os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE_VARIABLES
        )

    def refusal(self, repository: str) -> str | None:
        """Why a data set cannot be fetched, in words; None where it can."""
        if not self.is_reached:
            return _OUT_OF_REACH
        if repository not in self._refusals:
            self._refusals[repository] = self._ask(repository)
        return self._refusals[repository]

    def _ask(self, repository: str) -> str | None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            GatedRepoError,
            HfHubHTTPError,
            HTTPError,
            RepositoryNotFoundError,
        )

        try:
            HfApi().auth_check(repository, repo_type="dataset")
        except GatedRepoError:
            return "it is gated: ask for access on its page on the hub, then type `hf auth login`"
        except RepositoryNotFoundError:
            return "the hub has no such data set, or it is private (`hf auth login`)"
        except (OSError, ValueError, HTTPError) as error:
            if token := token_problem(error):
                return f"{token.what}; type: {token.fix}"
            is_an_answer = isinstance(error, HfHubHTTPError) and not is_out_of_reach(error)
            self.is_reached = is_an_answer
            return str(error).splitlines()[0] if is_an_answer else _OUT_OF_REACH
        return None


def find_lacks(tasks: Iterable[str]) -> list[Lack]:
    """What each of `evaluation.tasks` lacks; nltk's data is fetched where it can be.

    Raises: RequestError for a task that there is not (see `check_tasks`).
    """
    hub = Hub()
    found = []
    for task in tasks:
        leaves = leaves_of(resolve_task(task))
        found += [
            *_lacking_packages(task, leaves),
            *_lacking_data(task, leaves, hub),
            *_lacking_nltk(task, leaves, is_online=hub.is_reached),
        ]
    return found


def harness_environment(tasks: Iterable[str]) -> dict[str, str]:
    """What to set for the harness: not to ask the hub about data that is all here, for minutes where there is none."""
    leaves = [leaf for task in tasks for leaf in leaves_of(resolve_task(task))]
    found = [data_set_of(leaf) for leaf in leaves]
    is_all_here = all(data is not None and data_sets.is_here(data) for data in dict.fromkeys(found))
    return {"HF_DATASETS_OFFLINE": "1", "DATASETS_VERBOSITY": "error"} if found and is_all_here else {}


def require_needs(tasks: Iterable[str]) -> None:
    """Refuse tasks that lack something, all of them in one error. Raises: RequestError."""
    if lacks := find_lacks(tasks):
        raise lacks_error(lacks)


def lacks_error(lacks: list[Lack]) -> RequestError:
    """The error that says what tasks lack."""
    names = dict.fromkeys(lack.task for lack in lacks)
    count = "a task cannot be evaluated" if len(names) == 1 else f"{len(names)} tasks cannot be evaluated"
    return RequestError(
        "\n".join([f"{count} on this machine as it is:", *(f"  {line}" for line in told(lacks))]),
        problem_id="task-data-missing",
    )


def told(lacks: list[Lack]) -> list[str]:
    """A line for each task, and one for each thing to do."""
    by_task: dict[str, list[str]] = {}
    for lack in lacks:
        by_task.setdefault(lack.task, []).append(lack.lacks)
    to_fetch = dict.fromkeys(lack.task for lack in lacks if lack.fix is None)
    fetching = [f"with a network, type: tunebook fetch tasks={','.join(to_fetch)}"] if to_fetch else []
    fixes = dict.fromkeys(lack.fix for lack in lacks if lack.fix is not None)
    return [*(f"{task}: {'; '.join(what)}" for task, what in by_task.items()), *fetching, *fixes]


def leaves_of(task: TaskFile | str) -> list[LeafTask]:
    """The tasks behind one that was asked for, without those whose data lies beside their file."""
    return [] if isinstance(task, TaskFile) and task.has_own_data else leaf_tasks(task)


def missing_data(leaves: Iterable[LeafTask]) -> list[DataSet]:
    """The data sets of tasks that are not here, each once."""
    found = dict.fromkeys(data_set_of(leaf) for leaf in leaves)
    return [data for data in found if data is not None and not data_sets.is_here(data)]


def missing_nltk(leaves: Iterable[LeafTask]) -> list[NltkData]:
    """What of nltk's data tasks need and is not here."""
    needed = dict.fromkeys(data for leaf in leaves for data in nltk_data_of(leaf))
    return [data for data in needed if not nltk_data.is_here(data)]


def _lacking_packages(task: str, leaves: list[LeafTask]) -> list[Lack]:
    packages = sorted({package for leaf in leaves for package in missing_packages(leaf)})
    if not packages:
        return []
    what = listed(packages, "the Python package", "the Python packages")
    fix = f"type: pip install {' '.join(packages)} (in a container: add them to the image's lock)"
    return [Lack(task=task, lacks=f"{what} not installed here", fix=fix)]


def _lacking_data(task: str, leaves: list[LeafTask], hub: Hub) -> list[Lack]:
    missing = missing_data(leaves)
    gone = [file for data in missing if not data.is_on_the_hub for file in data.files if data_sets.is_local(file)]
    if gone:
        what = listed(gone, "the data file", "the data files")
        return [Lack(task=task, lacks=f"{what} not there", fix="correct dataset_kwargs.data_files in its file")]
    by_reason: dict[str, list[str]] = {}
    for data in missing:
        why = hub.refusal(data.path) if data.is_on_the_hub else None if hub.is_reached else "there is no network"
        if why is not None:
            by_reason.setdefault(why, []).append(data.label)
    return [
        Lack(task=task, lacks=f"{listed(labels, 'the data set', 'the data sets')} not on this machine, and {why}")
        for why, labels in by_reason.items()
    ]


def _lacking_nltk(task: str, leaves: list[LeafTask], *, is_online: bool) -> list[Lack]:
    lacks = []
    for data in missing_nltk(leaves):
        why = _why_not_downloaded(data) if is_online else "there is no network"
        if why is not None:
            lacks.append(Lack(task=task, lacks=f"{data.label} is not on this machine, and {why}"))
    return lacks


def _why_not_downloaded(data: NltkData) -> str | None:
    try:
        nltk_data.download(data)
    except RequestError as error:
        return f"it cannot be fetched ({str(error.__cause__).splitlines()[0]})"
    return None


def listed(names: list[str], one: str, several: str) -> str:
    """`the data set A is`, `the data sets A, B, C and 21 more are`."""
    if len(names) == 1:
        return f"{one} {names[0]} is"
    more = len(names) - _NUM_NAMED
    shown = ", ".join(names[:_NUM_NAMED])
    return f"{several} {shown} and {more} more are" if more > 0 else f"{several} {shown} are"
