"""What is looked at before a model is asked for programs: the settings, and that something can execute them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tunebook.config.schema import CodeConfig, EvaluationConfig
from tunebook.errors import RequestError
from tunebook.evaluate.code.code_task import CodeTask, with_choice
from tunebook.evaluate.sandbox.backends import open_backend
from tunebook.evaluate.task_files import TaskFile, resolve_task

if TYPE_CHECKING:
    from tunebook.evaluate.harness import Prompting


def check_code(evaluation: EvaluationConfig, tasks: Iterable[str]) -> None:
    """Refuse tasks whose programs could not be executed here, or contradict `evaluation.code`. Raises: RequestError."""
    chosen = [with_samples(resolve_task(task), evaluation.code) for task in tasks]
    require_sandbox(chosen, confirm_run_unsafe_code=evaluation.confirm_run_unsafe_code)


def with_samples(task: TaskFile | str, choice: CodeConfig) -> TaskFile | str:
    """A task with the configured samples, if it asks for programs. Raises: RequestError for what contradicts."""
    if isinstance(task, str) or task.code is None:
        return task
    return replace(task, code=with_choice(task.name, task.code, choice))


def has_code(tasks: Iterable[TaskFile | str]) -> bool:
    """Whether any task asks for programs."""
    return any(isinstance(task, TaskFile) and task.code is not None for task in tasks)


def require_sandbox(tasks: Iterable[TaskFile | str], *, confirm_run_unsafe_code: bool) -> None:
    """Refuse tasks with programs where nothing would execute them. Raises: RequestError saying why and what helps."""
    if has_code(tasks):
        with open_backend(confirm_run_unsafe_code=confirm_run_unsafe_code):
            pass


def check_context(name: str, code: CodeTask, prompting: Prompting) -> None:
    """Refuse programs longer than the model's context, which the harness ends in an assertion. Raises: RequestError."""
    longest = code.generation.get("max_gen_toks", prompting.max_gen_toks)
    if longest >= prompting.max_length:
        raise RequestError(
            f"{name} lets a program have {longest} tokens, and the whole context of this model, with the problem in "
            f"it, is {prompting.max_length}; try evaluation.code.max_new_tokens={max(prompting.max_length // 2, 1)}",
            problem_id="code-context",
        )
