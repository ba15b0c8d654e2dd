"""The tasks that ship with lm-evaluation-harness, by name, read from its files without importing it.

The harness' index parses every file as YAML, which takes ten seconds; this takes one. Code in the harness' task folders
is only read as text: importing some of it executes programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from tunebook.errors import RequestError, did_you_mean
from tunebook.evaluate.code.code_task import own_tasks

_NOT_CONFIGS = frozenset({".md", ".pyc", ".jsonl", ".txt"})
_NAME = re.compile(r'^["\']?(?:task|group|tag)["\']?: *["\']?([^\s"\'#\[]+)', re.MULTILINE)
_TAG_LIST = re.compile(r'^["\']?tag["\']?:((?:\s*\n *- .*)+)|^["\']?tag["\']?: *\[(.*)\]', re.MULTILINE)
_LIST_ITEM = re.compile(r'(?:^|[-,\n]) *["\']?([^\s"\',\]-][^\s"\',\]]*)')
_METRIC = re.compile(r'^ *metric="([^"]+)"', re.MULTILINE)
_RUNS_CODE = re.compile(r"^unsafe_code: *true|code_eval", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """Every task, group and tag of the installed harness, and those among them that execute generated programs."""

    files: dict[str, frozenset[Path]]  # by name: the files that define it, or have it as a tag
    runs_code: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Every name."""
        return frozenset(self.files)


def check_harness_name(name: str) -> None:
    """Refuse an unknown name and tasks that execute programs. Raises: RequestError with the nearest spelling."""
    tasks = harness_tasks()
    if name not in tasks.names:
        known = [*tasks.names, *own_tasks()]
        raise RequestError(
            f"evaluation.tasks: there is no task '{name}' in lm-evaluation-harness.{did_you_mean(name, known)} "
            "A task of your own is named by its file, such as tasks/mine.yaml",
            problem_id="unknown-task",
        )
    if name == "leaderboard" or name.startswith("leaderboard_math"):
        raise RequestError(
            f"evaluation.tasks: '{name}' is or holds the leaderboard's MATH-hard, which cannot run here: its data was "
            "taken down, and its scorer needs a version of antlr4 that Hydra cannot share an environment with. "
            "suite=leaderboard is the other five",
            problem_id="leaderboard-math-hard",
        )
    if name in tasks.runs_code:
        raise refuse_code(name)


def refuse_code(name: str) -> RequestError:
    """The error for a task that would execute programs with access to the weights and the user's files."""
    return RequestError(
        f"evaluation.tasks: '{name}' executes programs that a model wrote in the harness' own process, some even when "
        "they are imported; only the sandbox does that here. Tasks with programs that it judges: "
        f"{', '.join(own_tasks())}, all of suite=code among them, and files of yours with metadata.code",
        problem_id="task-runs-code",
    )


@lru_cache(maxsize=1)
def harness_tasks() -> HarnessTasks:
    """Scan the installed harness' task files. Raises: RequestError when the harness is not installed."""
    files_by_name: dict[str, set[Path]] = {}
    code_files: set[Path] = set()
    code_folders: set[Path] = set()
    for file in task_folder().rglob("*"):
        if file.suffix in _NOT_CONFIGS or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if _RUNS_CODE.search(text):
            code_files.add(file)
            if file.suffix == ".py":
                code_folders.add(file.parent)
        if file.suffix != ".py":
            for name in _names_in(text):
                files_by_name.setdefault(name, set()).add(file)
    runs_code = {
        name
        for name, files in files_by_name.items()
        if any(file in code_files or file.parent in code_folders for file in files)
    }
    files = {name: frozenset(found) for name, found in files_by_name.items()}
    return HarnessTasks(files=files, runs_code=frozenset(runs_code))


@lru_cache(maxsize=1)
def metric_names() -> frozenset[str]:
    """The metrics of the installed harness, read from its source: importing it imports torch."""
    source = task_folder().parent / "api" / "metrics.py"
    return frozenset(_METRIC.findall(source.read_text(encoding="utf-8")))


def _names_in(text: str) -> list[str]:
    names = _NAME.findall(text)
    for block, inline in _TAG_LIST.findall(text):
        names += _LIST_ITEM.findall(block or inline)
    return [name for name in names if name != "null"]


def task_folder() -> Path:
    """The folder with the installed harness' tasks. Raises: RequestError when the harness is not installed."""
    found = find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise RequestError(
            "lm-evaluation-harness is not installed here; install it with `pip install lm-eval==0.4.13`",
            problem_id="harness-missing",
        )
    return Path(next(iter(found.submodule_search_locations))) / "tasks"
