"""Run lm-evaluation-harness on a loaded model, through its Python API, quietly and from fresh data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError
from tunebook.evaluate.conversations import check_prompt_lengths, read_conversations, render_items, write_items
from tunebook.evaluate.task_files import TaskFile

if TYPE_CHECKING:
    from tunebook.evaluate.run_model import RunModel

SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # the harness' own defaults


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """What an evaluation asks of the harness, beside the model and the tasks."""

    num_fewshot: int | None  # None: the task's own
    limit: int | None  # items per task; None: all
    system_prompt: str | None  # put before prompts that have none
    items_folder: Path  # where rendered prompts are written
    cache_folder: Path  # for this evaluation alone: a cache kept between runs could hide changed data


def prepare_environment(is_offline: bool) -> None:
    """Set what the harness' libraries read from the environment on import; call before importing any of them."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A task that executes programs is refused by name; this stops one that comes in through a group.
    os.environ["HF_ALLOW_CODE_EVAL"] = "0"
    if is_offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "1"


def run_harness(model: RunModel, tasks: list[TaskFile | str], settings: HarnessSettings) -> dict[str, Any]:
    """The harness' results, merged over the tasks. Raises: RequestError for a task that cannot be loaded."""
    rendered = [task for task in tasks if is_rendered(task)]
    others = [task for task in tasks if not is_rendered(task)]
    # Every task is loaded before the first one runs, so that a missing data set is named now and not in an hour.
    rendered_objects = _load_tasks(rendered, model, settings)
    other_objects = _load_tasks(others, model, settings)
    results: dict[str, Any] = {}
    if rendered:  # these prompts have been through the template already
        _merge(results, _simple_evaluate(model, rendered_objects, settings, apply_chat_template=False))
    if others:
        has_template = model.tokenizer.chat_template is not None
        _merge(results, _simple_evaluate(model, other_objects, settings, apply_chat_template=has_template))
    return results


def is_rendered(task: TaskFile | str) -> bool:
    """Whether a task's prompts are held-out conversations that Tunebook renders."""
    return isinstance(task, TaskFile) and task.conversations is not None


def _load_tasks(tasks: list[TaskFile | str], model: RunModel, settings: HarnessSettings) -> list[Any]:
    """The harness' own objects, each with its data."""
    from lm_eval.tasks import TaskManager

    if not tasks:
        return []
    specs = [(str(task if isinstance(task, str) else task.file), _task_spec(task, model, settings)) for task in tasks]
    manager = TaskManager(include_defaults=any(isinstance(spec, str) for _, spec in specs))
    objects: list[Any] = []
    for name, spec in specs:
        try:
            loaded = manager.load([spec])
        except (ConnectionError, FileNotFoundError) as error:
            raise RequestError(
                f"the data of task {name} is not on this machine and cannot be fetched ({_first_line(error)}); with a "
                "network, unset HF_HUB_OFFLINE; without one, take the task out of evaluation.tasks",
                problem_id="task-data-missing",
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(
                f"lm-evaluation-harness refuses task {name}: {_first_line(error)}", problem_id="task-file"
            ) from error
        groups = loaded["groups"].values()
        within = {child for group in groups for child in group.child_names}
        objects += [item for item in (*groups, *loaded["tasks"].values()) if _name_of(item) not in within]
    return objects


def _name_of(item: Any) -> str:
    return str(item.task_name if hasattr(item, "task_name") else item.name)


def _first_line(error: Exception) -> str:
    """What an error says; a KeyError says no more than the key."""
    kind = type(error).__name__
    if isinstance(error, KeyError):
        return f"{kind}: {error}"
    return (str(error).splitlines() or [kind])[0]


def _simple_evaluate(
    model: RunModel, tasks: list[Any], settings: HarnessSettings, *, apply_chat_template: bool
) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with _without_environment_report():
        results: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            apply_chat_template=apply_chat_template,
            system_instruction=settings.system_prompt if apply_chat_template else None,
            task_manager=TaskManager(include_defaults=False),
            random_seed=SEEDS["python"],
            numpy_random_seed=SEEDS["numpy"],
            torch_random_seed=SEEDS["torch"],
            fewshot_random_seed=SEEDS["fewshot"],
        )
    return results


@contextmanager
def _without_environment_report() -> Iterator[None]:
    """Keep the harness from running `pip list` for two seconds, and git where there is none: the manifest has both."""
    from lm_eval import evaluator

    originals = evaluator.add_env_info, evaluator.get_git_commit_hash
    evaluator.add_env_info, evaluator.get_git_commit_hash = lambda storage: None, lambda: None
    try:
        yield
    finally:
        evaluator.add_env_info, evaluator.get_git_commit_hash = originals


def _task_spec(task: TaskFile | str, model: RunModel, settings: HarnessSettings) -> dict[str, Any] | str:
    """What the harness loads: a name, the file of a group, or a task's own settings."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if isinstance(task, str):
        return task
    if task.is_group:
        return str(task.file)
    config: dict[str, Any] = load_yaml(task.file)
    if task.conversations is None:
        return config
    data_file = _render(task, config, model, settings)
    return config | {
        "dataset_path": "json",
        "dataset_name": None,
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(data_file)}, "cache_dir": str(settings.cache_folder)},
    }


def _render(task: TaskFile, config: dict[str, Any], model: RunModel, settings: HarnessSettings) -> Path:
    """Write the task's held-out conversations as prompts of this model."""
    assert task.conversations is not None
    items = render_items(read_conversations(task.conversations, settings.system_prompt), model.tokenizer)
    max_gen_tokens = (config.get("generation_kwargs") or {}).get("max_gen_toks", model.max_gen_toks)
    check_prompt_lengths(items, model.tokenizer, model.max_length - max_gen_tokens)
    file = settings.items_folder / f"{task.name}-prompts.jsonl"
    write_items(items, file)
    return file


def _merge(results: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            results.setdefault(key, {}).update(value)
