"""Find missing requirements of an evaluation's tasks, all at once and before a model is loaded.

With a network, fetchable data sets are not missing: the harness downloads them, and nltk data is downloaded here.
Access to gated data sets is checked now rather than after an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.errors import RequestError, first_few, first_line
from tunebook.evaluate.code.code_task import book_task_files
from tunebook.evaluate.task_files import resolve_task
from tunebook.files import cache_root
from tunebook.model.hub import is_out_of_reach, token_problem

if TYPE_CHECKING:
    from tunebook.evaluate.task_requirements import DataSet, LeafTask

_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_NLTK_KIND = "tokenizers"  # of all nltk data that the harness' tasks use
_OUT_OF_REACH = "the hub is out of reach"
_NUM_NAMED = 3  # parts of a group named in a message; the others are counted


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A missing requirement of one task. The record of an evaluation has these keys under `left_out`."""

    task: str
    lacks: str  # what is missing, and why it cannot be fetched
    fix: str | None = None  # the fix, if it is not fetching


class Hub:
    """Finds out whether data sets can be fetched. Asks once for each, and never again if the hub does not answer."""

    def __init__(self) -> None:
        self._refusals: dict[str, str | None] = {}
        self.is_reached = not any(
            os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE_VARIABLES
        )

    def refusal(self, data: DataSet) -> str | None:
        """Return why a data set cannot be fetched; None if it can."""
        if not data.is_on_the_hub:
            return None if self.is_reached else "there is no network"
        if not self.is_reached:
            return _OUT_OF_REACH
        if data.path not in self._refusals:
            self._refusals[data.path] = self._ask(data.path)
        return self._refusals[data.path]

    def nltk_refusal(self, package: str) -> str | None:
        """Download nltk data now; return why that failed, None on success."""
        if not self.is_reached:
            return "there is no network"
        try:
            download_nltk_package(package)
        except RequestError as error:
            return f"it cannot be fetched ({first_line(error.__cause__ or error)})"
        return None

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
            self.is_reached = isinstance(error, HfHubHTTPError) and not is_out_of_reach(error)
            return first_line(error) if self.is_reached else _OUT_OF_REACH
        return None


def find_missing(tasks: Iterable[str], hub: Hub | None = None) -> list[Missing]:
    """Find tasks' missing requirements that `hub` cannot provide. Raises: RequestError for an unknown task."""
    hub = hub or Hub()
    return [missing for task in tasks for missing in _missing_of(task, leaves_of(task), hub)]


def _missing_of(task: str, leaves: list[LeafTask], hub: Hub) -> Iterator[Missing]:
    if not leaves:
        return
    from tunebook.evaluate.task_requirements import data_set_of, missing_packages, nltk_packages

    if packages := sorted({package for leaf in leaves for package in missing_packages(leaf)}):
        fix = f"type: pip install {' '.join(packages)} (in a container: add them to the image's lock)"
        yield Missing(task=task, lacks=f"{_enumerate(packages, 'Python package')} not installed here", fix=fix)
    found = dict.fromkeys(data_set_of(leaf) for leaf in leaves)
    data_sets = [data for data in found if data is not None and not data.is_local]
    if files := [file for data in data_sets for file in data.missing_files if not data.is_on_the_hub]:
        fix = "correct dataset_kwargs.data_files in its file"
        yield Missing(task=task, lacks=f"{_enumerate(files, 'data file')} not there", fix=fix)
        data_sets = []
    by_reason: dict[str, list[str]] = {}
    for data in data_sets:
        if reason := hub.refusal(data):
            by_reason.setdefault(reason, []).append(data.label)
    for reason, labels in by_reason.items():
        yield Missing(task=task, lacks=f"{_enumerate(labels, 'data set')} not on this machine, and {reason}")
    for package in dict.fromkeys(package for leaf in leaves for package in nltk_packages(leaf)):
        if not is_nltk_package_local(package) and (reason := hub.nltk_refusal(package)):
            yield Missing(task=task, lacks=f"nltk data {package} is not on this machine, and {reason}")


def require_task_data(tasks: Iterable[str]) -> None:
    """Refuse tasks with missing requirements, all in one error. Raises: RequestError."""
    if missing := find_missing(tasks):
        raise missing_error(missing)


def missing_error(missing: list[Missing]) -> RequestError:
    """Return the error for tasks with missing requirements."""
    names = {entry.task for entry in missing}
    count = "a task cannot be evaluated" if len(names) == 1 else f"{len(names)} tasks cannot be evaluated"
    return RequestError(
        "\n".join([f"{count} on this machine as it is:", *(f"  {line}" for line in describe_missing(missing))]),
        problem_id="task-data-missing",
    )


def describe_missing(missing: list[Missing]) -> list[str]:
    """Return one line per task and one per fix."""
    by_task: dict[str, list[str]] = {}
    for entry in missing:
        by_task.setdefault(entry.task, []).append(entry.lacks)
    to_fetch = dict.fromkeys(entry.task for entry in missing if entry.fix is None)
    fetching = [f"with a network, type: tunebook fetch tasks={','.join(to_fetch)}"] if to_fetch else []
    code = [f"{task}@FILE" for task in to_fetch if task in book_task_files()]
    problems = [f"or with the problems in a local file, type: tasks={','.join(code)}"] if code else []
    fixes = dict.fromkeys(entry.fix for entry in missing if entry.fix is not None)
    return [*(f"{task}: {'; '.join(what)}" for task, what in by_task.items()), *fetching, *problems, *fixes]


def harness_environment(tasks: Iterable[str]) -> dict[str, str]:
    """Return the harness' environment: offline if all data is local. Else it asks the hub, for minutes if offline."""
    tasks = [*tasks]
    if not tasks:  # without importing the harness
        return {}
    from tunebook.evaluate.task_requirements import data_set_of

    found = dict.fromkeys(data_set_of(leaf) for task in tasks for leaf in leaves_of(task))
    is_all_local = all(data is not None and data.is_local for data in found)
    return {"HF_DATASETS_OFFLINE": "1", "DATASETS_VERBOSITY": "error"} if found and is_all_local else {}


def leaves_of(name: str) -> list[LeafTask]:
    """Return the tasks behind a name or file; none if its data is next to its file, so that nothing can be missing."""
    task = resolve_task(name)
    if task.has_own_data:
        return []
    from tunebook.evaluate.task_requirements import leaf_tasks

    return leaf_tasks(task)


def _enumerate(names: list[str], kind: str) -> str:
    """`the data set A is`, `the data sets A, B, C and 21 more are`."""
    if len(names) == 1:
        return f"the {kind} {names[0]} is"
    return f"the {kind}s {first_few(names, _NUM_NAMED)} are"


def nltk_folder() -> Path:
    """Return the nltk download folder, in Tunebook's cache, which outlives containers."""
    return cache_root() / "nltk_data"


def search_path() -> str:
    """Return NLTK_DATA extended by that folder; nltk reads the variable on import."""
    named = os.environ.get("NLTK_DATA", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*filter(None, named), str(nltk_folder())]))


def is_nltk_package_local(package: str) -> bool:
    """Return whether nltk finds the package in its own folders or in Tunebook's, as when a task is loaded."""
    import nltk.data

    with _nltk_environment():
        try:
            nltk.data.find(f"{_NLTK_KIND}/{package}", [*search_path().split(os.pathsep), *nltk.data.path])
        except (LookupError, PermissionError):  # nltk also refuses folders that others may write to
            return False
    return True


def download_nltk_package(package: str) -> None:
    """Download a package of nltk data. Raises: RequestError."""
    from nltk.downloader import Downloader

    folder = nltk_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder.chmod(0o755)  # nltk reads no data from a folder that others may write to
    options = {"quiet": True, "raise_on_error": True, "print_error_to": StringIO()}  # the raised error says it all
    try:
        with _nltk_environment():
            Downloader(download_dir=str(folder)).download(package, **options)
    except (ValueError, OSError) as error:  # no network, or an index without the package
        reason = first_line(error)
        raise RequestError(
            f"nltk data {package} cannot be downloaded ({reason}); with a network, type the same again, or copy "
            f"{_NLTK_KIND}/{package}/ from another machine into {folder}",
            problem_id="task-data-missing",
        ) from error


@contextmanager
def _nltk_environment() -> Iterator[None]:
    """Let nltk trust Tunebook's folder and the user's proxy settings; by default it refuses both."""
    changed = {"NLTK_DATA": search_path(), "NLTK_ALLOW_PROXIED_URLOPEN": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
