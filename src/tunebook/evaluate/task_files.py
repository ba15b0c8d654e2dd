"""Find the tasks of an evaluation: the harness' own by name, YAML files in its format, and suites of them.

Two keys under `metadata` are Tunebook's. `conversations` names a file of held-out conversations, relative to the YAML
file. Before each evaluation the run's chat template renders them into a JSONL of {prompt, answer, task}, which is the
task's `test` split. `baseline` names a Python file with a function that scores the same items without a model.

A suite is an evaluation group of the book, with its tasks, limit, examples and batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from tunebook.config.book import book_root, is_task_file, resolve_path
from tunebook.config.schema import EvaluationConfig
from tunebook.errors import RequestError, did_you_mean
from tunebook.evaluate.code.code_task import CodeTask, book_task_files, read_code_task, with_choice


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: one of the harness' own, or a file, whose Python functions are not imported."""

    name: str
    file: Path | None = None  # None: the harness' own
    conversations: Path | None = None
    baseline: Path | None = None
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


def resolve_tasks(evaluation: EvaluationConfig) -> list[Task]:
    """Return all tasks of an evaluation; `evaluation.code` applies to its code tasks.

    Raises: RequestError for a file that is no task, and for a contradiction between a task and `evaluation.code`.
    """
    tasks = [resolve_task(task) for task in evaluation.tasks]
    return [
        task if task.code is None else replace(task, code=with_choice(task.name, task.code, evaluation.code))
        for task in tasks
    ]


def read_task_file(file: Path) -> Task:
    """Read a task's YAML. Raises: RequestError if it is missing, is no task, or executes generated programs."""
    config = _read_yaml(file)
    name = config.get("task")
    if not isinstance(name, str):
        raise RequestError(f"{file} has no key 'task' with the task's name", problem_id="task-file")
    if runs_code(config):
        raise refuse_code(name)
    metadata = config.get("metadata") or {}
    files = {key: (file.parent / metadata[key]).resolve() for key in ("conversations", "baseline") if key in metadata}
    for key, path in files.items():
        if not path.is_file():
            raise RequestError(f"{file}: metadata.{key}: there is no file {path}", problem_id="task-file")
    return Task(name=name, file=file, code=read_code_task(file, config), **files)


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
    """Return a suite's evaluation settings. Raises: RequestError for an unknown suite, with the nearest name."""
    suites: dict[str, Any] = {}
    for file in sorted((book_root() / "hydra_configs" / "evaluation").glob("*.yaml")):
        merged = OmegaConf.merge(OmegaConf.structured(EvaluationConfig), OmegaConf.load(file))
        if not OmegaConf.is_missing(merged, "tasks") and merged.tasks:
            suites[file.stem] = OmegaConf.to_object(merged)
    if name not in suites:
        raise RequestError(
            f"there is no suite '{name}'.{did_you_mean(name, suites, 'All suites: tunebook explain evaluation.')} For "
            "tasks of lm-evaluation-harness, or YAML files of your own, type tasks=gsm8k,mine.yaml",
            problem_id="unknown-suite",
        )
    settings: EvaluationConfig = suites[name]
    return settings
