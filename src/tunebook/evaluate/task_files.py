"""Find the tasks of an evaluation: the harness' own by name, YAML files in its format, and suites of them.

`metadata.conversations` is Tunebook's: it names a file of held-out conversations, relative to the YAML file. Before
each evaluation the run's chat template renders them into a JSONL of {prompt, answer, task}, the task's `test` split.

A suite is an evaluation group of the book, with its tasks, limit, examples and batch size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tunebook.config.book import is_task_file, resolve_path
from tunebook.config.compose import compose
from tunebook.config.schema import EvaluationConfig
from tunebook.errors import RequestError
from tunebook.evaluate.code.code_task import CodeTask, book_task_files, read_code_task


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: one of the harness' own, or a file, whose Python functions are not imported."""

    name: str
    file: Path | None = None  # None: the harness' own
    conversations: Path | None = None
    code: CodeTask | None = None  # the model writes programs, which the sandbox judges

    @property
    def has_own_data(self) -> bool:
        """Whether the task's items are next to its file, so that none can be missing."""
        return self.conversations is not None or (self.code is not None and self.code.problems is not None)


def resolve_task(task: str) -> Task:
    """Return the task of a file or of a name. Names of the harness are checked when they are loaded.

    Raises: RequestError for a file that is no task.
    """
    if is_task_file(task):
        return read_task_file(resolve_path(task))
    book_tasks = book_task_files()
    return read_task_file(book_tasks[task]) if task in book_tasks else Task(name=task)


def resolve_tasks(tasks: Iterable[str]) -> list[Task]:
    """Return the tasks of files and names. Raises: RequestError, also for two of one name: results are kept by it."""
    resolved = [resolve_task(task) for task in tasks]
    by_name = {task.name: task for task in resolved}
    for task in resolved:
        if (other := by_name[task.name]).file != task.file:
            places = (f"{file or 'lm-evaluation-harness'}" for file in (task.file, other.file))
            raise RequestError(
                f"evaluation.tasks: two tasks are called '{task.name}', of {' and '.join(places)}, and their results "
                "would replace each other; write another name behind 'task:' in one of the files",
                problem_id="task-name-taken",
            )
    return resolved


def read_task_file(file: Path) -> Task:
    """Read a task's YAML. Raises: RequestError if it is missing, is no task, or executes generated programs."""
    config = _read_yaml(file)
    name = config.get("task")
    if not isinstance(name, str):
        raise RequestError(f"{file} has no key 'task' with the task's name", problem_id="task-file")
    if runs_code(config):
        raise refuse_code(name)
    metadata = config.get("metadata") or {}
    conversations = None
    if "conversations" in metadata:
        conversations = (file.parent / metadata["conversations"]).resolve()
        if not conversations.is_file():
            message = f"{file}: metadata.conversations: no file {conversations}; type a path from the task's folder"
            raise RequestError(message, problem_id="task-file")
    return Task(name=name, file=file, code=read_code_task(file, config), conversations=conversations)


def _read_yaml(file: Path) -> dict[str, Any]:
    """Read a file's keys over those of its includes, as the harness does, without importing it or any function."""
    try:
        config: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), Loader=_FunctionsAsText)
        included = config.pop("include", [])
        merged: dict[str, Any] = {}
        for name in included if isinstance(included, list) else [included]:
            merged |= _read_yaml(file.parent / name)
    except OSError as error:
        raise RequestError(
            f"evaluation.tasks: cannot read the task file {error.filename}; name a YAML file, or a task of "
            "lm-evaluation-harness without the ending",
            problem_id="task-file",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{file} is not a task's YAML: {reason}", problem_id="task-file") from error
    return merged | config


class _FunctionsAsText(yaml.SafeLoader):
    """Reads `!function module.name` as text, so that reading a task imports nothing."""


_FunctionsAsText.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def runs_code(config: dict[str, Any]) -> bool:
    """Whether a task executes generated programs in the harness' own process."""
    return config.get("unsafe_code") is True or "code_eval" in str(config)


def refuse_code(name: str) -> RequestError:
    """Return the error for a task that would execute programs with access to the weights and the user's files."""
    return RequestError(
        f"evaluation.tasks: '{name}' executes programs that a model wrote in the harness' own process; only the "
        f"sandbox does that here. Tasks with programs that it judges: {', '.join(book_task_files())}, all of "
        "suite=code among them, and files of yours with metadata.code",
        problem_id="task-runs-code",
    )


def suite_settings(name: str) -> EvaluationConfig:
    """A suite's evaluation settings, those of `evaluation=NAME`. Raises: RequestError for an unknown suite."""
    return compose(None, [f"evaluation={name}"]).config.evaluation
