"""The single tasks that a name stands for (a group, a tag, a task) and their settings, read without the harness.

The harness itself would import each task's Python code and load its data to answer this. What cannot be told from the
files alone, such as a task written in Python, is left to the harness, which loads every task before the first one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.evaluate.harness_tasks import harness_tasks
from tunebook.evaluate.task_files import TaskFile, read_task_config

_OVERRIDES = ("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset")  # of a group, for its tasks


@dataclass(frozen=True, kw_only=True)
class LeafTask:
    """One task with its data."""

    name: str
    config: dict[str, Any]  # `!function` values are `task_files.FunctionName`
    folder: Path  # that they are looked up in


def leaf_tasks(task: TaskFile | str) -> list[LeafTask]:
    """The tasks that a task file or a name of the harness stands for, without what cannot be told.

    Raises: RequestError for a task file that includes what is not there.
    """
    if isinstance(task, str):
        return _named(task, {}, frozenset())
    config = read_task_config(task.file)
    if task.is_group:
        return _members(config, {}, task.file.parent, frozenset())
    return [] if task.conversations is not None else [_leaf(config, {}, task.file.parent)]


def _named(name: str, overrides: dict[str, Any], seen: frozenset[str]) -> list[LeafTask]:
    files = sorted(harness_tasks().files.get(name, ())) if name not in seen else []
    for file in files:
        config = read_task_config(file)
        if config.get("group") == name:
            return _members(config, overrides, file.parent, seen | {name})
        if config.get("task") == name:
            return [_leaf(config, overrides, file.parent)]
    tagged = [(file, config) for file in _carrying(files) if name in _tags(config := read_task_config(file))]
    return [_leaf(config, overrides, file.parent) for file, config in tagged if isinstance(config.get("task"), str)]


def _members(group: dict[str, Any], overrides: dict[str, Any], folder: Path, seen: frozenset[str]) -> list[LeafTask]:
    """The tasks of a group, which may define some of them in place."""
    overrides = {key: group[key] for key in _OVERRIDES if key in group} | overrides
    members = group.get("task")
    leaves: list[LeafTask] = []
    for member in members if isinstance(members, list) else [members]:
        entry = member if isinstance(member, dict) else {"task": member}
        own = overrides | {key: entry[key] for key in _OVERRIDES if key in entry}
        name = entry.get("group", entry.get("task"))
        if isinstance(name, str) and name in harness_tasks().files:
            leaves += _named(name, own, seen)
        elif "group" in entry:
            leaves += _members(entry, own, folder, seen)
        elif "dataset_path" in own:
            leaves.append(_leaf(entry, own, folder))
    return leaves


def _carrying(tagged: list[Path]) -> list[Path]:
    """Files that carry a tag, and those that may include one of them and so carry it too."""
    names = {file.name for file in tagged}
    found = dict.fromkeys(tagged)
    for folder in sorted({file.parent for file in tagged}):
        for file in sorted(folder.rglob("*.yaml")):
            text = file.read_text(encoding="utf-8") if file not in found else ""
            if "include" in text and any(name in text for name in names):
                found[file] = None
    return list(found)


def _tags(config: dict[str, Any]) -> list[str]:
    tags = config.get("tag") or []
    return [tags] if isinstance(tags, str) else list(tags)


def _leaf(config: dict[str, Any], overrides: dict[str, Any], folder: Path) -> LeafTask:
    return LeafTask(name=str(config.get("task") or folder.name), config=config | overrides, folder=folder)
