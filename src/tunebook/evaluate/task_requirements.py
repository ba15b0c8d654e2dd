"""Requirements of a task that may be missing here: data sets, Python packages and nltk data.

The harness' own factory expands groups and tags. Tasks are not built, because that downloads their data. Task code is
read as text, because importing some of it executes programs. Importing this module imports the harness, but not torch.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from tunebook.evaluate.task_files import Task, harness_tasks, task_folder

# Arguments of `load_dataset` that do not select a part of a data set.
_NOT_A_PART = frozenset(
    {
        "cache_dir", "download_config", "download_mode", "keep_in_memory", "num_proc", "revision", "save_infos",
        "split", "storage_options", "streaming", "token", "trust_remote_code", "verification_mode",
    }
)  # fmt: skip
_FILE_FORMATS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text", "xml"})
_HARNESS_TASKS = "lm_eval.tasks."
# Imported packages whose pip name differs.
_PACKAGES = {
    "math_verify": "math-verify",
    "pkg_resources": "'setuptools<81'",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
}
_FUNCTION = re.compile(r"(/.{,1000})/(\w[\w.]{,200})\.\w+")
_NLTK_DOWNLOAD = re.compile(r"""nltk\.download\(\s*["'](\w+)""")


@dataclass(frozen=True, kw_only=True)
class LeafTask:
    """One task of the harness, not built; `!function` values are paths like `/folder/module.function`."""

    task_name: str  # as the harness' groups read it
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """The arguments of `datasets.load_dataset` for one task."""

    path: str  # organization/name on the hub, a folder, or a file format
    subset: str | None
    options_json: str  # other arguments, as JSON so that equal data sets compare equal

    @property
    def options(self) -> dict[str, Any]:
        """Other arguments of `load_dataset`."""
        options: dict[str, Any] = json.loads(self.options_json)
        return options

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.path if self.subset is None else f"{self.path} ({self.subset})"

    @property
    def missing_files(self) -> list[str]:
        """Local data files that do not exist."""
        named = self.options.get("data_files", [])
        parts = list(named.values()) if isinstance(named, dict) else [named]
        files = [str(file) for part in parts for file in (part if isinstance(part, list) else [part])]
        return [file for file in files if "://" not in file and not set("*?[") & set(file) and not Path(file).exists()]

    @property
    def is_on_the_hub(self) -> bool:
        """Whether the data set is loaded from a repository on the hub."""
        return self.path not in _FILE_FORMATS and not Path(self.path).exists()

    @property
    def is_local(self) -> bool:
        """Whether the data set loads without a network."""
        if self.path in _FILE_FORMATS:
            return not self.missing_files and "://" not in self.options_json
        return not self.is_on_the_hub or self._is_cached()

    def _is_cached(self) -> bool:
        """Return whether the library finds it in its cache; only the library knows how folder names encode the part."""
        from datasets.packaged_modules.cache.cache import _find_hash_in_cache

        logging.getLogger("datasets.packaged_modules.cache.cache").setLevel(logging.ERROR)
        try:
            _find_hash_in_cache(
                dataset_name=self.path,
                config_name=self.subset,
                cache_dir=self.options.get("cache_dir"),
                config_kwargs={key: value for key, value in self.options.items() if key not in _NOT_A_PART},
                custom_features=None,
            )
        except (ValueError, OSError):  # missing, or several parts with none selected
            return False
        return True


@lru_cache(maxsize=1)
def harness_index() -> dict[str, Entry]:
    """Return the harness' index of its own tasks, groups and tags; do not modify it."""
    return {
        name: Entry(name=name, kind=Kind[kind], yaml_path=file and task_folder() / file, tags=set(members))
        for name, (kind, file, members) in harness_tasks().entries.items()
    }


def leaf_tasks(task: Task) -> list[LeafTask]:
    """Return the tasks in a task, group or tag; empty if the harness cannot expand it: loading reports the reason."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # the harness warns of duplicate names
    index = dict(harness_index()) if task.file is None or task.is_group else {}
    if task.file is not None:
        own: dict[str, Entry] = {}
        for file in [task.file, *(task.file.parent.glob("*.yaml") if task.is_group else [])]:
            with suppress(Exception):  # as in the harness, skip a file that is no task
                TaskIndex.process_cfg(load_yaml(file, resolve_func=False), file, own)
        index |= own
    factory = _LeafFactory()
    try:
        factory.build(index[task.name], overrides=None, registry=index)
    except Exception:  # a broken group file can raise anything; a group that contains itself recurses
        return []
    return factory.leaves


def data_set_of(leaf: LeafTask) -> DataSet | None:
    """Return the data set that a task's configuration names; None if its code makes or finds the data."""
    config = leaf.config
    if not isinstance(config.get("dataset_path"), str) or "custom_dataset" in config or "class" in config:
        return None
    subset = config.get("dataset_name")
    options = {key: value for key, value in (config.get("dataset_kwargs") or {}).items() if key != "trust_remote_code"}
    return DataSet(
        path=config["dataset_path"],
        subset=None if subset is None else str(subset),
        options_json=json.dumps(options, sort_keys=True, default=str),
    )


def missing_packages(leaf: LeafTask) -> list[str]:
    """Return the pip names of packages that a task's code imports and that are not installed."""
    names = {name.partition(".")[0] for file in imported_files(leaf) for name in _imports(file)}
    return [_PACKAGES.get(name, name) for name in sorted(names) if name and not _is_installed(name)]


def nltk_packages(leaf: LeafTask) -> list[str]:
    """Return the nltk data packages that a task's code downloads on import."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(imported_files(leaf))]
    return list(dict.fromkeys(name for text in texts for name in _NLTK_DOWNLOAD.findall(text)))


def imported_files(leaf: LeafTask) -> frozenset[Path]:
    """Return the Python files, of the harness or next to the task's file, that loading a task imports."""
    files: set[Path] = set()
    waiting = [file for folder, module in _functions(leaf.config) for file in _file_of(module, folder)]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += [found for name in _imports(file) for found in _file_of(name, file.parent)]
    return frozenset(files)


class _LeafFactory(TaskFactory):  # type: ignore[misc]  # the harness has no type marker
    """Expands groups and tags like the harness, but collects the tasks instead of building them."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[LeafTask] = []

    def _load_full_config(self, entry: Entry, overrides: dict[str, Any] | None = None) -> Any:
        if entry.yaml_path is not None:  # its functions are not imported
            config = load_yaml(entry.yaml_path, resolve_func=False)
            entry = Entry(name=entry.name, kind=entry.kind, yaml_path=None, cfg=config)
        return super()._load_full_config(entry, overrides)

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> LeafTask:
        leaf = LeafTask(task_name=entry.name, config=self._load_full_config(entry, overrides))
        self.leaves.append(leaf)
        return leaf

    def _build_group_members(
        self, members: list[Any], group: str, overrides: dict[str, Any] | None, registry: dict[str, Entry]
    ) -> Any:
        for member in members:  # a task that the group itself defines would be built at once: index it
            name = member.get("task") if isinstance(member, dict) and "group" not in member else member
            if isinstance(name, str) and name not in registry:
                registry[name] = Entry(name=name, kind=Kind.TASK, yaml_path=None, cfg={"task": name})
        return super()._build_group_members(members, group, overrides, registry)


def _functions(value: Any) -> Iterator[tuple[Path, str]]:
    """Yield folder and module of every value that may be a function of the harness."""
    if isinstance(value, str):
        if match := _FUNCTION.fullmatch(value):
            yield Path(match[1]), match[2]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions(item)


def _file_of(module: str, folder: Path) -> list[Path]:
    """Return the file of a module of the harness' tasks or in `folder`; none for an installed package."""
    relative = module.removeprefix(_HARNESS_TASKS)
    start = task_folder() if relative != module else folder
    stem = start.joinpath(*relative.split("."))
    candidates = [stem.with_suffix(".py")]
    if relative != module:  # `from package import module` and `from module import name` look alike
        candidates += [stem / "__init__.py", stem.parent.with_suffix(".py")]
    with suppress(OSError):  # name too long: text that only looks like a function
        return [file for file in candidates if file.is_file()][:1]
    return []


@lru_cache(maxsize=256)
def _imports(file: Path) -> tuple[str, ...]:
    """Return the modules that a file requires on import; empty if it is not Python."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # loading it gives a better report
        return ()
    return tuple(name for statement in tree.body for name in _imported_by(statement))


def _imported_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        # A module of the harness may be one of the names. For a package, its own name is enough.
        is_harness = statement.module.startswith(_HARNESS_TASKS)
        yield from (f"{statement.module}.{alias.name}" if is_harness else statement.module for alias in statement.names)
    elif isinstance(statement, ast.Try) and any(
        isinstance(node, ast.Raise) for handler in statement.handlers for node in ast.walk(handler)
    ):  # a failed import still ends in an error, with a friendlier message
        yield from (name for inner in statement.body for name in _imported_by(inner))


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
