"""Find the tasks of an evaluation: the harness' own by name, YAML files in its format, and suites of them.

Two keys under `metadata` are Tunebook's. `conversations` names a file of held-out conversations, relative to the YAML
file. Before each evaluation the run's chat template renders them into a JSONL of {prompt, answer, task}, which is the
task's `test` split. `baseline` names a Python file with a function that scores the same items without a model.

A suite is an evaluation group of the book, with its tasks, limit, examples and batch size. The suite `quick` is the
local tasks that the run's recipe ships, with the run's other settings.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.book import book_root, is_task_file, problems_of, recipe_folders, resolve_path
from tunebook.config.interpolation import to_object
from tunebook.config.schema import EvaluationConfig, RunConfig
from tunebook.errors import RequestError, TunebookError, did_you_mean, first_line, nearest
from tunebook.evaluate.code.code_task import CodeTask, book_task_files, read_code_task
from tunebook.files import cache_root, remember, sha256_text

QUICK = "quick"  # the tasks that a run's recipe ships
_METRIC = re.compile(r'^ *metric="([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: one of the harness' own, or a file, whose Python functions are not imported."""

    name: str
    file: Path | None = None  # None: the harness' own
    conversations: Path | None = None
    baseline: Path | None = None
    is_group: bool = False  # a file that names other tasks, possibly the harness' own
    code: CodeTask | None = None  # the model writes programs, which the sandbox judges

    @property
    def has_own_data(self) -> bool:
        """Whether the task's items are next to its file, so that none can be missing."""
        return self.conversations is not None or (self.code is not None and self.code.problems is not None)


def check_tasks(tasks: list[str]) -> None:
    """Check `evaluation.tasks` without importing torch or the harness. Raises: RequestError with every problem."""
    errors: list[TunebookError] = []
    for task in tasks:
        try:
            resolve_task(task)
        except RequestError as error:
            errors.append(error)
    if errors:
        raise RequestError("\n".join(error.message for error in errors), problem_id=errors[0].problem_id)


def resolve_task(task: str) -> Task:
    """Return the task of a file or of a name that the harness or the book knows. Raises: RequestError."""
    if is_task_file(task):
        return read_task_file(resolve_path(task))
    if (problems := problems_of(task)) is not None:
        return _with_problems(task.partition("@")[0], resolve_path(problems))
    if task in book_task_files():
        return read_task_file(book_task_files()[task])
    check_harness_name(task)
    return Task(name=task)


def _with_problems(name: str, problems: Path) -> Task:
    """Return one of the book's code tasks that reads its problems from a file. Raises: RequestError."""
    if name not in book_task_files():
        raise RequestError(
            f"evaluation.tasks: '{name}@{problems}' gives a file of problems to '{name}', and only the book's code "
            f"tasks take one.{did_you_mean(name, book_task_files())} They are {', '.join(book_task_files())}. Another "
            "task on data of yours is a YAML file with dataset_path: json",
            problem_id="problems-file",
        )
    if not problems.is_file():
        raise RequestError(f"evaluation.tasks: there is no file {problems}", problem_id="problems-file")
    task = read_task_file(book_task_files()[name])
    assert task.code is not None
    return replace(task, code=replace(task.code, problems=problems))


def read_task_file(file: Path) -> Task:
    """Read a task's YAML. Raises: RequestError if it is missing, is no task, or executes generated programs."""
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
    return Task(
        name=name,
        file=file,
        conversations=_named_file(file, metadata, "conversations"),
        baseline=_named_file(file, metadata, "baseline"),
        is_group=is_group,
        code=read_code_task(file, config),
    )


def _check_metrics(file: Path, config: dict[str, Any]) -> None:
    """Refuse a misspelled metric, which the harness reports only after it loads model and data."""
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
    """Merge a file's keys over those of its includes, as the harness does, without importing functions.

    Raises: RequestError if a file is missing, is not YAML or includes itself.
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
        reason = getattr(error, "problem", None) or first_line(error)
        raise RequestError(f"{place}: this is not YAML: {reason}", problem_id="task-file") from error
    if not isinstance(config, dict):
        raise RequestError(f"{file} holds no keys, so it is not a task", problem_id="task-file")
    return config


def _named_file(file: Path, metadata: dict[str, Any], key: str) -> Path | None:
    """Return the file that a metadata key names, relative to the task's own file."""
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


def refuse_suite_and_tasks(suite: str | None, tasks: list[str] | None) -> None:
    """Raises: RequestError if both are named."""
    if suite is not None and tasks is not None:
        raise RequestError(
            f"suite={suite} and tasks={','.join(tasks)} exclude each other; type one of them",
            problem_id="suite-and-tasks",
        )


def suite_settings(name: str, config: RunConfig) -> EvaluationConfig:
    """Return a suite's evaluation settings for a run with this configuration.

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
    """Return the book's evaluation groups that name tasks."""
    found = {}
    for file in sorted((book_root() / "hydra_configs" / "evaluation").glob("*.yaml")):
        settings = _read_group(file)
        if settings is not None and settings.tasks:
            found[file.stem] = settings
    return found


def _read_group(file: Path) -> EvaluationConfig | None:
    """Read one group over the schema's defaults; None if the user has to name its tasks."""
    try:
        values = OmegaConf.create(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        merged = OmegaConf.merge(OmegaConf.structured(EvaluationConfig), values)
        if OmegaConf.is_missing(merged, "tasks"):
            return None
        settings = to_object(merged)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RequestError(
            f"{file} is not an evaluation group: {first_line(error)}; its keys are those of `evaluation`",
            problem_id="suite-file",
        ) from error
    assert isinstance(settings, EvaluationConfig)
    return settings


def _quick(config: RunConfig) -> EvaluationConfig:
    folders = [folder / config.recipe / "tasks" for folder in recipe_folders([])] if config.recipe else []
    tasks = [str(file) for folder in folders for file in sorted(folder.glob("*.yaml"))]
    tasks = tasks or [task for task in config.evaluation.tasks if is_task_file(task)]
    if not tasks:
        missing = f"{config.recipe} ships none" if config.recipe else "this run has no recipe"
        raise RequestError(
            f"suite={QUICK} is the tasks that a run's recipe ships in its folder tasks/, and {missing}; name another "
            f"suite ({', '.join(sorted(_groups()))}), or tasks=a,b",
            problem_id="unknown-suite",
        )
    return replace(config.evaluation, tasks=tasks)


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """All tasks, groups and tags of the installed harness, and those that execute generated programs."""

    entries: dict[str, tuple[str, str | None, list[str]]]  # name -> kind, file in the task folder, members of a tag
    runs_code: frozenset[str]


def check_harness_name(name: str) -> None:
    """Refuse an unknown name and tasks that execute programs. Raises: RequestError with the nearest spelling."""
    tasks = harness_tasks()
    if name not in tasks.entries:
        known = [*tasks.entries, *book_task_files()]
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
    """Return the error for a task that would execute programs with access to the weights and the user's files."""
    return RequestError(
        f"evaluation.tasks: '{name}' executes programs that a model wrote in the harness' own process, some even when "
        "they are imported; only the sandbox does that here. Tasks with programs that it judges: "
        f"{', '.join(book_task_files())}, all of suite=code among them, and files of yours with metadata.code",
        problem_id="task-runs-code",
    )


@lru_cache(maxsize=1)
def harness_tasks() -> HarnessTasks:
    """Return the index of the installed harness' task files. Raises: RequestError if the harness is not installed.

    Building the index takes the harness seven CPU seconds, so the cache folder keeps it for each version.
    """
    folder = task_folder()
    key = sha256_text(f"{version('lm_eval')} {folder}")[:16]
    file = cache_root() / f"harness-tasks-{key}.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return HarnessTasks(entries=stored["entries"], runs_code=frozenset(stored["runs_code"]))
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged
        made = _make_index(folder)
        remember(file, json.dumps({"entries": made.entries, "runs_code": sorted(made.runs_code)}))
        return made


def _make_index(folder: Path) -> HarnessTasks:
    """Build the harness' index of a folder without importing its Python files: some execute programs on import."""
    from lm_eval.tasks._index import TaskIndex

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # the harness warns of duplicate names
    index = TaskIndex.build([folder])
    sources = {file: file.read_text(encoding="utf-8", errors="replace") for file in folder.rglob("*.py")}
    code_folders = {file.parent for file, text in sources.items() if "code_eval" in text}

    def runs_code(name: str) -> bool:
        entry = index[name]
        if entry.yaml_path is None:
            return any(runs_code(task) for task in entry.tags)
        is_unsafe = entry.cfg.get("unsafe_code") is True or "code_eval" in str(entry.cfg)
        return is_unsafe or entry.yaml_path.parent in code_folders

    entries = {}
    for name, entry in index.items():
        file = None if entry.yaml_path is None else str(entry.yaml_path.relative_to(folder))
        entries[name] = (entry.kind.name, file, sorted(entry.tags) if file is None else [])
    return HarnessTasks(entries=entries, runs_code=frozenset(filter(runs_code, index)))


@lru_cache(maxsize=1)
def metric_names() -> frozenset[str]:
    """Return the installed harness' metrics, read from its source, because importing it imports torch."""
    source = task_folder().parent / "api" / "metrics.py"
    return frozenset(_METRIC.findall(source.read_text(encoding="utf-8")))


def task_folder() -> Path:
    """Return the folder of the installed harness' tasks. Raises: RequestError if the harness is not installed."""
    found = find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise RequestError(
            "lm-evaluation-harness is not installed here; install it with `pip install lm-eval==0.4.13`",
            problem_id="harness-missing",
        )
    return Path(next(iter(found.submodule_search_locations))) / "tasks"
