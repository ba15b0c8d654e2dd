"""`run.yaml`: the resolved configuration that the launcher writes and every rank reads.

With relative paths it also contains the folder in which they were typed, so that they resolve from anywhere. If that
folder does not exist, they start at the working directory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.config.book import (
    PlacedPath,
    is_relative,
    is_task_file,
    is_template_name,
    placed,
    problems_of,
    resolve_path,
)
from tunebook.config.choices import LauncherName, Strategy
from tunebook.config.interpolation import escaped, to_object
from tunebook.config.model_facts import ARCHITECTURE_FILE, LayerFacts, layers_from_json
from tunebook.config.schema import (
    FsdpConfig,
    LauncherConfig,
    ParallelismConfig,
    RayConfig,
    RunConfig,
    SlurmConfig,
    ZeroConfig,
)
from tunebook.config.unsafe_text import shown
from tunebook.config.walk import field_types, texts_of
from tunebook.errors import RequestError, first_line

_INTERPOLATION = "${"  # how one begins
_COMMENT_COLUMN = 40  # where comments start, behind all but the longest values
PARALLELISM_SCHEMAS: dict[Strategy, type[ParallelismConfig]] = {
    Strategy.single: ParallelismConfig,
    Strategy.ddp: ParallelismConfig,
    Strategy.zero1: ZeroConfig,
    Strategy.zero2: ZeroConfig,
    Strategy.zero3: ZeroConfig,
    Strategy.fsdp: FsdpConfig,
    Strategy.fsdp_grad_op: FsdpConfig,
    Strategy.hsdp: FsdpConfig,
}
LAUNCHER_SCHEMAS: dict[LauncherName, type[LauncherConfig]] = {
    LauncherName.local: LauncherConfig,
    LauncherName.slurm: SlurmConfig,
    LauncherName.ray: RayConfig,
}

# Not a key of the configuration, and in no hash: the same settings are the same run wherever they are typed.
TYPED_IN_KEY = "typed_in"


def architecture_json(config: RunConfig) -> str | None:
    """The content of a run's `architecture.json`; None if the layers of its model are unknown."""
    facts = config.model.facts
    return None if facts is None or facts.measured is None else json.dumps(asdict(facts.measured)) + "\n"


def _recorded_layers(architecture: Path) -> LayerFacts | None:
    """What a run's `architecture.json` records of its model's layers; None without one."""
    return layers_from_json(json.loads(architecture.read_text(encoding="utf-8"))) if architecture.is_file() else None


def config_to_yaml(config: RunConfig, comment: Callable[[str], str] | None = None) -> str:
    """A configuration as YAML text that `load_config` reads, with the folder where its relative paths start.

    Its values are final, so a `${` in one is escaped. `comment` returns the comment of a dotted key, a section's or a
    value's; an empty one is left out.
    """
    if any(_INTERPOLATION in text for _, texts, _ in texts_of(config) for text in texts):
        config = _escaped(config)
    text: str = OmegaConf.to_yaml(OmegaConf.structured(config))
    folder = typed_in(config)
    if folder is not None:
        text += OmegaConf.to_yaml(OmegaConf.create({TYPED_IN_KEY: str(folder)}))
    return text if comment is None else _with_comments(text, comment)


def _with_comments(text: str, comment: Callable[[str], str]) -> str:
    """The YAML text with a comment on the last line of each value, and on the line of a section's or a list's name."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, place in reversed(list(_ends(root, ""))):
        if words := shown(comment(key)):  # a line break would end the comment
            place = text.find("\n", place)  # behind the key's colon
            column = place - text.rfind("\n", 0, place) - 1
            text = f"{text[:place]}{' ' * max(2, _COMMENT_COLUMN - column)}# {words}{text[place:]}"
    return text


def _ends(mapping: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Every dotted key below a YAML mapping, with the offset where its one-line value ends, or else where it ends."""
    for name, value in mapping.value:
        key = f"{prefix}{name.value}"
        is_block = isinstance(value, yaml.CollectionNode) and bool(value.value)
        yield key, (name if is_block else value).end_mark.index
        if is_block and isinstance(value, yaml.MappingNode):
            yield from _ends(value, f"{key}.")


def _escaped(value: Any) -> Any:
    """A copy of a configuration, or of a part of it, without interpolations for OmegaConf."""
    if isinstance(value, str):
        return escaped(value) if _INTERPOLATION in value else value
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _escaped(getattr(value, field.name)) for field in fields(value)})
    return value


def typed_in_of(file: Path) -> Path | None:
    """The folder where the relative paths of a `run.yaml` start; None if there is none or it cannot be read."""
    try:
        folder: Any = OmegaConf.to_container(OmegaConf.load(file)).get(TYPED_IN_KEY)  # type: ignore[union-attr]
    except (OSError, OmegaConfBaseException, YAMLError, AttributeError):
        return None
    return Path(folder) if isinstance(folder, str) else None


def load_config(file: Path) -> RunConfig:
    """Read a frozen `run.yaml`. Raises: RequestError if it is missing, damaged or of another version's schema."""
    try:
        merged, folder = copy.deepcopy(_parse(file.read_text(encoding="utf-8")))
        layers = _recorded_layers(file.with_name(ARCHITECTURE_FILE))
    except FileNotFoundError as error:
        raise RequestError(f"{file} is not there, so this is no run folder", problem_id="no-run-folder") from error
    except (OmegaConfBaseException, YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestError(
            f"{file} cannot be read as a run's configuration: {first_line(error)}; it was edited by hand or "
            "written by another version of Tunebook",
            problem_id="no-run-folder",
        ) from error
    assert isinstance(merged, RunConfig)
    if layers is not None and merged.model.facts is not None:
        merged.model.facts.measured = layers
    if isinstance(folder, str) and Path(folder).is_dir():
        place_paths(merged, Path(folder))
    return merged


@lru_cache(maxsize=16)  # a command reads the run.yaml of each of its runs several times, and parsing takes 50 ms
def _parse(text: str) -> tuple[Any, Any]:
    """The configuration in the text of a run.yaml, and the folder where its paths start."""
    plain: Any = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    folder = plain.pop(TYPED_IN_KEY, None)
    parts = {field.name: plain.pop(field.name) for field in fields(RunConfig) if field.name in plain}
    config = OmegaConf.structured(RunConfig)
    config.parallelism = PARALLELISM_SCHEMAS[Strategy[parts["parallelism"]["strategy"]]]
    config.launcher = LAUNCHER_SCHEMAS[LauncherName[parts["launcher"]["name"]]]
    return to_object(OmegaConf.merge(config, parts | plain)), folder


def typed_in(config: RunConfig) -> Path | None:
    """The folder that a configuration's relative paths start at; None if it has none."""
    found = [text for section, key in _relative_paths(config, None) for text in _path_texts(getattr(section, key))]
    if not found:
        return None
    return next((text.typed_in for text in found if isinstance(text, PlacedPath)), Path.cwd())


def place_paths(config: RunConfig, folder: Path) -> None:
    """Make a configuration's relative paths start at a folder, whatever the working directory is.

    The texts stay unchanged, since the configuration's hash is computed from them.
    """
    for section, key in list(_relative_paths(config, folder)):
        value = getattr(section, key)
        if isinstance(value, list):
            setattr(section, key, [placed(task, folder) if _is_relative_task(task) else task for task in value])
        else:
            setattr(section, key, placed(value, folder))


def _is_relative_task(task: str) -> bool:
    problems = problems_of(task)
    return is_relative(task if problems is None else problems) and (problems is not None or is_task_file(task))


def _path_texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else [task for task in value if _is_relative_task(task)]


def _relative_paths(config: RunConfig, folder: Path | None) -> Iterator[tuple[Any, str]]:
    """Section and key of each setting with a relative path, which starts at `folder` or where it starts now."""
    model, dataset = config.model, config.dataset
    sources = [dataset, *dataset.parts.values()]
    paths = [(model, "path"), (model, "chat_template"), (dataset, "validation_path")]
    for section, key in [*paths, *((source, "path") for source in sources)]:
        text = getattr(section, key)
        if text and is_relative(text) and not (key == "chat_template" and is_template_name(text)):
            yield section, key
    for section, key in [(model, "tokenizer"), *((source, "name") for source in sources)]:
        text = getattr(section, key)
        if text and is_relative(text) and (resolve_path(text) if folder is None else folder / text).exists():
            yield section, key  # else it is a name on the hub
    if any(map(_is_relative_task, config.evaluation.tasks)):
        yield config.evaluation, "tasks"


def plain_config(**given: Any) -> RunConfig:
    """A `RunConfig` of the given fields without Hydra; other sections have the schema's defaults, for one process.

    Nothing is resolved or checked, and there is nothing to train: no task, no learning rate, rows of no tokens.
    """
    schemas: dict[str, Any] = {name: kind for name, kind in field_types(RunConfig).items() if is_dataclass(kind)}
    required: dict[str, dict[str, Any]] = {
        "parallelism": {"strategy": Strategy.single},
        "optimizer": {"learning_rate": 0.0},
        "launcher": {"name": LauncherName.local},
        "evaluation": {"tasks": []},
        "training": {"max_length": 0},
    }
    sections: dict[str, Any] = {name: schema(**required.get(name, {})) for name, schema in schemas.items()}
    return RunConfig(**sections | given)
