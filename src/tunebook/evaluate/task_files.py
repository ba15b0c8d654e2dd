"""Tasks in YAML files of the user or of this book, in the harness' format, and suites: named sets of tasks.

Two keys under `metadata` are Tunebook's. `conversations` names a file of held-out conversations, relative to the YAML
file: before each evaluation the run's chat template renders them into a JSONL of {prompt, answer, task}, which the task
reads as its `test` split. `baseline` names a Python file with a function that scores the same items without a model.

A suite is an evaluation group of the book, with its tasks, limit, examples and batch size; or `quick`, the local tasks
that the run's recipe ships, with the run's other settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.book import book_root, is_task_file, recipe_folders, resolve_path
from tunebook.config.interpolation import to_object
from tunebook.config.schema import EvaluationConfig, RunConfig
from tunebook.errors import RequestError, TunebookError, did_you_mean, nearest
from tunebook.evaluate.code.code_task import CodeTask, own_tasks, read_code_task
from tunebook.evaluate.harness_tasks import check_harness_name, metric_names, refuse_code

QUICK = "quick"  # the suite of the tasks that a run's recipe ships


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """One task file; none of its Python functions is imported."""

    name: str
    file: Path
    conversations: Path | None
    baseline: Path | None
    is_group: bool  # names other tasks, possibly the harness' own
    code: CodeTask | None = None  # the model writes programs, which the sandbox judges

    @property
    def has_own_data(self) -> bool:
        """Whether its items are next to it, so that none can be missing."""
        return self.conversations is not None or (self.code is not None and self.code.problems is not None)


def check_tasks(tasks: list[str]) -> None:
    """Check `evaluation.tasks`, without importing torch or the harness. Raises: RequestError with every problem."""
    errors: list[TunebookError] = []
    for task in tasks:
        try:
            resolve_task(task)
        except RequestError as error:
            errors.append(error)
    if errors:
        raise RequestError("\n".join(error.message for error in errors), problem_id=errors[0].problem_id)


def resolve_task(task: str) -> TaskFile | str:
    """A task file, or a name that the harness knows. Raises: RequestError."""
    if is_task_file(task):
        return read_task_file(resolve_path(task))
    if task in own_tasks():
        return read_task_file(own_tasks()[task])
    check_harness_name(task)
    return task


def read_task_file(file: Path) -> TaskFile:
    """Read a task's YAML. Raises: RequestError when it is missing, is no task, or executes generated programs."""
    config = read_task_config(file)
    is_group = "group" in config
    name = config.get("group" if is_group else "task")
    if not isinstance(name, str):
        raise RequestError(f"{file} has no key 'task' with the task's name", problem_id="task-file")
    if config.get("unsafe_code") is True or "code_eval" in str(config):
        raise refuse_code(name)
    _check_metrics(file, config)
    metadata = config.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return TaskFile(
        name=name,
        file=file,
        conversations=_beside(file, metadata, "conversations"),
        baseline=_beside(file, metadata, "baseline"),
        is_group=is_group,
        code=read_code_task(file, config),
    )


def _check_metrics(file: Path, config: dict[str, Any]) -> None:
    """Refuse a misspelled metric, which the harness reports only after loading model and data."""
    metrics = config.get("metric_list")
    if "process_results" in config or not isinstance(metrics, list):  # the task may define its own
        return
    known = metric_names()
    for entry in metrics:
        metric = entry.get("metric") if isinstance(entry, dict) and not entry.get("hf_evaluate") else None
        if isinstance(metric, str) and metric not in known and nearest(metric, known):
            raise RequestError(
                f"{file}: there is no metric '{metric}' in lm-evaluation-harness.{did_you_mean(metric, known)} "
                "A metric of the evaluate library needs hf_evaluate: true next to it",
                problem_id="task-file",
            )


def read_task_config(file: Path, seen: frozenset[Path] = frozenset()) -> dict[str, Any]:
    """The file's keys over those of the files it includes, as the harness merges them; no function is imported.

    Raises: RequestError when a file is missing, is not YAML or includes itself.
    """
    if file in seen:
        raise RequestError(f"{file} includes itself", problem_id="task-file")
    config = _read_yaml(file)
    included = config.pop("include", [])
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        merged |= read_task_config((file.parent / str(name)).resolve(), seen | {file})
    return merged | config


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        config = yaml.load(file.read_text(encoding="utf-8"), Loader=_FunctionsAsText)
    except OSError as error:
        raise RequestError(
            f"evaluation.tasks: there is no task file {file}; name a YAML file, or a task of lm-evaluation-harness "
            "without the ending",
            problem_id="task-file",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}" if mark is not None else str(file)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RequestError(f"{place}: this is not YAML: {reason}", problem_id="task-file") from error
    if not isinstance(config, dict):
        raise RequestError(f"{file} holds no keys, so it is no task", problem_id="task-file")
    return config


def _beside(file: Path, metadata: dict[str, Any], key: str) -> Path | None:
    """The file that a metadata key names, relative to the task's own file."""
    if key not in metadata:
        return None
    named = (file.parent / str(metadata[key])).resolve()
    if not named.is_file():
        raise RequestError(
            f"{file}: metadata.{key} is '{metadata[key]}', but there is no file {named}", problem_id="task-file"
        )
    return named


class _FunctionsAsText(yaml.SafeLoader):
    """Reads `!function module.name` as text, so that reading a task imports nothing."""


_FunctionsAsText.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def suite_settings(name: str, config: RunConfig) -> EvaluationConfig:
    """The evaluation settings of a suite for a run of this configuration.

    Raises: RequestError for an unknown suite, with the nearest name, and for `quick` if the recipe ships no tasks.
    """
    if name == QUICK:
        return _quick(config)
    groups = _groups()
    if name not in groups:
        known = sorted([*groups, QUICK])
        raise RequestError(
            f"there is no suite '{name}'.{did_you_mean(name, known)} Suites: {', '.join(known)}. Single tasks of "
            "lm-evaluation-harness, or YAML files of your own, are named by tasks=a,b",
            problem_id="unknown-suite",
        )
    return groups[name]


def _groups() -> dict[str, EvaluationConfig]:
    """The evaluation groups of the book that name tasks."""
    found = {}
    for file in sorted((book_root() / "hydra_configs" / "evaluation").glob("*.yaml")):
        settings = _read_group(file)
        if settings is not None and settings.tasks:
            found[file.stem] = settings
    return found


def _read_group(file: Path) -> EvaluationConfig | None:
    """One group over the schema's defaults; None if the user is to name its tasks."""
    try:
        values = OmegaConf.create(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        merged = OmegaConf.merge(OmegaConf.structured(EvaluationConfig), values)
        if OmegaConf.is_missing(merged, "tasks"):
            return None
        settings = to_object(merged)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RequestError(
            f"{file} is no evaluation group: {str(error).splitlines()[0]}; its keys are those of `evaluation`",
            problem_id="suite-file",
        ) from error
    assert isinstance(settings, EvaluationConfig)
    return settings


def _quick(config: RunConfig) -> EvaluationConfig:
    tasks = _shipped_tasks(config.recipe) if config.recipe else []
    tasks = tasks or [task for task in config.evaluation.tasks if is_task_file(task)]
    if not tasks:
        missing = f"{config.recipe} ships none" if config.recipe else "this run has no recipe"
        raise RequestError(
            f"suite={QUICK} is the tasks that a run's recipe ships in its folder tasks/, and {missing}; name another "
            f"suite ({', '.join(sorted(_groups()))}), or tasks=a,b",
            problem_id="unknown-suite",
        )
    return replace(config.evaluation, tasks=tasks)


def _shipped_tasks(recipe: str) -> list[str]:
    folders = (folder / recipe / "tasks" for folder in recipe_folders([]))
    return [str(file) for folder in folders for file in sorted(folder.glob("*.yaml"))]
