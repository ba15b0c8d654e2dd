"""Data of nltk that tasks of the harness download while they are imported, listed so that it can be there before.

Where it cannot be had, the harness goes on without a word and fails at the first answer that it scores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from tunebook.errors import RequestError
from tunebook.evaluate.harness_tasks import task_folder
from tunebook.evaluate.needs.leaf_tasks import LeafTask
from tunebook.evaluate.needs.modules import imported_files
from tunebook.files import cache_root

_PATH_VARIABLE = "NLTK_DATA"


@dataclass(frozen=True, kw_only=True)
class NltkData:
    """One package of nltk's data, and the files of the harness whose import asks for it."""

    package: str  # as nltk's index calls it
    place: str  # below a folder of nltk data
    asked_by: tuple[str, ...]  # below lm_eval/tasks

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"nltk data {self.package}"


# Of the leaderboard's tasks only leaderboard_ifeval downloads anything beside its data set.
NLTK_DATA = (
    NltkData(
        package="punkt_tab",  # splits text into sentences and words
        place="tokenizers/punkt_tab",
        asked_by=(
            "ifeval/instructions_util.py",  # ifeval, leaderboard_ifeval, ifeval_ca and ifeval_es
            "leaderboard/ifeval/instructions_util.py",
            "ruler/prepare_niah.py",  # the niah tasks of ruler
        ),
    ),
    NltkData(package="punkt", place="tokenizers/punkt", asked_by=("nerel-bench/utils.py",)),
)


def nltk_data_of(task: LeafTask) -> list[NltkData]:
    """What of nltk's data a task needs."""
    files = imported_files(task)
    return [data for data in NLTK_DATA if any(task_folder() / name in files for name in data.asked_by)]


def nltk_folder() -> Path:
    """Where it is downloaded to: in Tunebook's cache, which outlives containers."""
    return cache_root() / "nltk_data"


def search_path() -> str:
    """What NLTK_DATA must be for nltk to look there too; it reads the variable as it is imported."""
    named = os.environ.get(_PATH_VARIABLE, "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*filter(None, named), str(nltk_folder())]))


def is_here(data: NltkData) -> bool:
    """Whether nltk finds it, in its own folders or in Tunebook's, as it will when a task is loaded."""
    import nltk.data

    with _looking_there():
        try:
            nltk.data.find(data.place, [*search_path().split(os.pathsep), *nltk.data.path])
        except (LookupError, PermissionError):  # it also refuses folders that others may write to
            return False
    return True


def download(data: NltkData) -> None:
    """Fetch it. Raises: RequestError where it cannot be had."""
    from nltk.downloader import Downloader

    folder = nltk_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder.chmod(0o755)  # nltk takes no data from a folder that others may write to
    options = {"quiet": True, "raise_on_error": True, "print_error_to": StringIO()}  # the error itself says it all
    try:
        with _looking_there():
            Downloader(download_dir=str(folder)).download(data.package, **options)
    except (ValueError, OSError) as error:  # what nltk makes of no network, and of an index without it
        raise RequestError(
            f"{data.label} cannot be downloaded ({_summary(error)}); with a network, type the same again, or bring "
            f"{data.place}/ from another machine into {folder}",
            problem_id="task-data-missing",
        ) from error


@contextmanager
def _looking_there() -> Iterator[None]:
    """Have nltk trust Tunebook's folder, and the proxy that the user's environment names: it refuses both by itself."""
    said = {_PATH_VARIABLE: search_path(), "NLTK_ALLOW_PROXIED_URLOPEN": "1"}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _summary(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
