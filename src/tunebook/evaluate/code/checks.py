"""Checks before code generation: the settings are valid, and a sandbox can execute programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.interpolation import to_object
from tunebook.config.ranges import range_of
from tunebook.config.schema import CodeConfig, EvaluationConfig
from tunebook.errors import RequestError, did_you_mean, first_line
from tunebook.evaluate.code.code_task import CodeTask, with_choice
from tunebook.evaluate.sandbox.client import open_backend
from tunebook.evaluate.task_files import Task, resolve_task

PREFIX = "evaluation.code."


def check_code(evaluation: EvaluationConfig, tasks: Iterable[str]) -> None:
    """Refuse code tasks that contradict `evaluation.code` or cannot be executed here. Raises: RequestError."""
    chosen = [with_samples(resolve_task(task), evaluation.code) for task in tasks]
    require_sandbox(chosen, confirm_run_unsafe_code=evaluation.confirm_run_unsafe_code)


def with_samples(task: Task, choice: CodeConfig) -> Task:
    """Apply the configured samples to a code task. Raises: RequestError for a contradiction."""
    return task if task.code is None else replace(task, code=with_choice(task.name, task.code, choice))


def require_sandbox(tasks: Iterable[Task], *, confirm_run_unsafe_code: bool) -> None:
    """Refuse code tasks if no sandbox can execute programs. Raises: RequestError with the reason and the fix."""
    if any(task.code is not None for task in tasks):
        with open_backend(confirm_run_unsafe_code=confirm_run_unsafe_code):
            pass


def check_context(name: str, code: CodeTask, *, max_gen_toks: int, max_length: int) -> None:
    """Refuse programs longer than the model's context: the harness would fail an assertion. Raises: RequestError."""
    longest = code.generation.get("max_gen_toks", max_gen_toks)
    if longest >= max_length:
        raise RequestError(
            f"{name} allows a program {longest} tokens, and the whole context of this model, with the problem in it, "
            f"is {max_length}; try evaluation.code.max_new_tokens={max(max_length // 2, 1)}",
            problem_id="code-context",
        )


def apply_overrides(evaluation: EvaluationConfig, overrides: Sequence[str]) -> EvaluationConfig:
    """Apply overrides like `evaluation.code.num_samples=20`. Raises: RequestError for an invalid one."""
    code = evaluation.code
    for override in overrides:
        code = _take(code, override)
    return replace(evaluation, code=code)


def _take(code: CodeConfig, override: str) -> CodeConfig:
    key, _, text = override.partition("=")
    name = key.removeprefix(PREFIX)
    names = [field.name for field in fields(CodeConfig)]
    if not key.startswith(PREFIX) or name not in names:
        known = [PREFIX + name for name in names]
        raise RequestError(
            f"there is no setting '{key}' here.{did_you_mean(key, known)} About programs: {', '.join(known)}",
            problem_id="unknown-key",
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(code), OmegaConf.from_dotlist([f"{name}={text}"]))
        taken = to_object(merged)
    except OmegaConfBaseException as error:
        raise RequestError(
            f"{override} cannot be read: {first_line(error)}; try {PREFIX}num_samples=20, "
            f"{PREFIX}temperature=0.8 or {PREFIX}pass_at_k=[1,10]",
            problem_id="unknown-key",
        ) from error
    assert isinstance(taken, CodeConfig)
    limits, value = range_of({field.name: field for field in fields(CodeConfig)}[name]), getattr(taken, name)
    if limits is not None and value is not None and (demand := limits.demand(value)):
        raise RequestError(f"{override}: it must be {demand}, or left out", problem_id="unknown-key")
    return taken
