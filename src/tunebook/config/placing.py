"""Which settings of a run are relative paths, and which folder they start at when the run is read again.

A run is chatted with, exported and made again from other folders than the one that it was started in. Its own words
stay as they are, since the hash of its configuration is made of them; the folder is remembered beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunebook.config.book import PlacedPath, is_relative, placed, resolve_path
from tunebook.config.schema import RunConfig

_TASK_FILES = (".yaml", ".yml")  # other words among the tasks are names


def typed_in(config: RunConfig) -> Path | None:
    """The folder that a configuration's relative paths start at; None where it has none."""
    found = [text for section, key in _places(config, None) for text in _texts(getattr(section, key))]
    if not found:
        return None
    return next((text.typed_in for text in found if isinstance(text, PlacedPath)), Path.cwd())


def place_paths(config: RunConfig, folder: Path) -> None:
    """Have a configuration's relative paths start at a folder, whatever the working directory is."""
    for section, key in list(_places(config, folder)):
        value = getattr(section, key)
        is_list = isinstance(value, list)
        setattr(section, key, [_placed(text, folder) for text in value] if is_list else placed(value, folder))


def _placed(task: str, folder: Path) -> str:
    return placed(task, folder) if _is_task_file(task) else task


def _is_task_file(task: str) -> bool:
    return task.endswith(_TASK_FILES) and is_relative(task)


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else [task for task in value if _is_task_file(task)]


def _places(config: RunConfig, folder: Path | None) -> Iterator[tuple[Any, str]]:
    """Section and key of each setting that holds a relative path, seen from `folder` or as it starts now."""
    model, dataset = config.model, config.dataset
    sources = [dataset, *dataset.parts.values()]
    paths = [(model, "path"), (model, "chat_template"), (dataset, "validation_path")]
    for section, key in [*paths, *((source, "path") for source in sources)]:
        text = getattr(section, key)
        if text and is_relative(text):
            yield section, key
    for section, key in [(model, "tokenizer"), *((source, "name") for source in sources)]:
        text = getattr(section, key)
        if text and is_relative(text) and _is_there(text, folder):  # else it is a name on the hub
            yield section, key
    if any(map(_is_task_file, config.evaluation.tasks)):
        yield config.evaluation, "tasks"


def _is_there(text: str, folder: Path | None) -> bool:
    return (resolve_path(text) if folder is None else folder / text).exists()
