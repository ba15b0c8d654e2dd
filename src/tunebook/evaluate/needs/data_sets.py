"""The data set of a task: which it is, and whether the `datasets` library can load it here without a network."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.evaluate.needs.leaf_tasks import LeafTask

# Arguments of `load_dataset` that do not say which part of a data set is loaded.
_NOT_A_PART = frozenset(
    {
        "cache_dir", "download_config", "download_mode", "keep_in_memory", "num_proc", "revision", "save_infos",
        "split", "storage_options", "streaming", "token", "trust_remote_code", "verification_mode",
    }
)  # fmt: skip
_OF_FILES = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text", "xml"})


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """What a task loads: arguments of `datasets.load_dataset`."""

    path: str  # organisation/name on the hub, a folder, or a kind of files
    subset: str | None
    options_json: str  # the other arguments, as JSON, so that equal data sets compare equal

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments."""
        options: dict[str, Any] = json.loads(self.options_json)
        return options

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.path if self.subset is None else f"{self.path} ({self.subset})"

    @property
    def files(self) -> list[str]:
        """The files it is read from, where it is a kind of files."""
        named = self.options.get("data_files", [])
        parts = list(named.values()) if isinstance(named, dict) else [named]
        return [str(file) for part in parts for file in (part if isinstance(part, list) else [part])]

    @property
    def is_on_the_hub(self) -> bool:
        """Whether it is loaded from a repository on the hub."""
        return self.path not in _OF_FILES and not Path(self.path).exists()


def data_set_of(task: LeafTask) -> DataSet | None:
    """The data set that a task's settings name; None where its code makes or finds the data."""
    path = task.config.get("dataset_path")
    if not isinstance(path, str) or "custom_dataset" in task.config or "class" in task.config:
        return None
    subset = task.config.get("dataset_name")
    options = task.config.get("dataset_kwargs") or {}
    options = {key: value for key, value in options.items() if key != "trust_remote_code"}
    return DataSet(
        path=path,
        subset=None if subset is None else str(subset),
        options_json=json.dumps(options, sort_keys=True, default=str),
    )


def is_here(data: DataSet) -> bool:
    """Whether it can be loaded without a network."""
    if data.path in _OF_FILES:
        return all(is_local(file) and (_has_wildcard(file) or Path(file).exists()) for file in data.files)
    return not data.is_on_the_hub or _is_cached(data)


def is_local(file: str) -> bool:
    """Whether a data file is a path and no address."""
    return "://" not in file


def _has_wildcard(file: str) -> bool:
    return any(letter in file for letter in "*?[")


def _is_cached(data: DataSet) -> bool:
    """Whether the library finds it in its cache: asked in the library's own words, since parts have names of theirs."""
    from datasets.packaged_modules.cache.cache import _find_hash_in_cache

    part = {key: value for key, value in data.options.items() if key not in _NOT_A_PART}
    with _quiet():
        try:
            _find_hash_in_cache(
                dataset_name=data.path,
                config_name=data.subset,
                cache_dir=data.options.get("cache_dir"),
                config_kwargs=part,
                custom_features=None,
            )
        except (ValueError, OSError):  # not there, or several of which none is named
            return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's word on what it found."""
    logger = logging.getLogger("datasets.packaged_modules.cache.cache")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
