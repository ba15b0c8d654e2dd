"""The Python code that loading a task imports: the harness' own files, and packages that may not be installed.

Read as text, since importing some of it executes programs or downloads things.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunebook.evaluate.harness_tasks import task_folder
from tunebook.evaluate.needs.leaf_tasks import LeafTask
from tunebook.evaluate.task_files import FunctionName

_HARNESS_TASKS = "lm_eval.tasks."
# Packages that are called otherwise than what they are imported as, of those that tasks import.
_PACKAGES = {
    "math_verify": "math-verify",
    "pkg_resources": "'setuptools<81'",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
}


def imported_files(task: LeafTask) -> frozenset[Path]:
    """The Python files of the harness, or beside the task, that loading a task imports."""
    files: set[Path] = set()
    waiting = [file for name in _functions(task.config) for file in _file_of(name.rpartition(".")[0], task.folder)]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += [found for name in _imports(file) for found in _file_of(name, file.parent)]
    return frozenset(files)


def missing_packages(task: LeafTask) -> list[str]:
    """The packages that a task's code needs and that are not installed here, as pip calls them."""
    names = {name.partition(".")[0] for file in imported_files(task) for name in _imports(file)}
    missing = sorted(name for name in names if name and not _is_installed(name))
    return [_PACKAGES.get(name, name) for name in missing]


def _functions(value: Any) -> Iterator[FunctionName]:
    if isinstance(value, FunctionName):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _functions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _functions(item)


def _file_of(module: str, folder: Path) -> list[Path]:
    """The file of a module of the harness' tasks or beside a task; none for an installed package's."""
    relative = module.removeprefix(_HARNESS_TASKS)
    start = task_folder() if relative != module else folder
    stem = start.joinpath(*relative.split("."))
    # `from package import module` and `from module import name` look alike.
    candidates = [stem.with_suffix(".py"), stem / "__init__.py", stem.parent.with_suffix(".py")]
    if relative == module:  # what an installed package is called, a folder beside the task may be called too
        candidates = candidates[:1]
    return [file for file in candidates if file.is_file()][:1]


@lru_cache(maxsize=256)
def _imports(file: Path) -> tuple[str, ...]:
    """What a file imports as it is loaded and cannot do without; empty where it is not Python."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # loading it says so better
        return ()
    return tuple(name for statement in tree.body for name in _imported_by(statement))


def _imported_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        # A module of the harness may be one of the names; of a package the package is enough.
        is_harness = statement.module.startswith(_HARNESS_TASKS)
        yield from (f"{statement.module}.{alias.name}" if is_harness else statement.module for alias in statement.names)
    elif isinstance(statement, ast.Try) and _raises(statement.handlers):
        yield from (name for inner in statement.body for name in _imported_by(inner))


def _raises(handlers: list[ast.ExceptHandler]) -> bool:
    """Whether a failure ends in one all the same, as with a friendlier message."""
    return any(isinstance(node, ast.Raise) for handler in handlers for node in ast.walk(handler))


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
