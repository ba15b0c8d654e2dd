"""`run.yaml`: the resolved configuration that the launcher writes and every rank reads.

It also contains the folder in which its relative paths were typed, so that they resolve from anywhere. If that folder
does not exist, they start at the working directory.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.config.book import YAML_SUFFIXES, PlacedPath, is_relative, is_task_file, placed
from tunebook.config.choices import LauncherName, Strategy
from tunebook.config.identity import plain
from tunebook.config.model_facts import ARCHITECTURE_FILE, layers_from_json
from tunebook.config.schema import CHOICE_SCHEMAS, RunConfig
from tunebook.errors import RequestError, first_line

# Not a key of the configuration, and in no hash: the same settings are the same run wherever they are typed.
TYPED_IN_KEY = "typed_in"


def architecture_json(config: RunConfig) -> str | None:
    """The content of a run's `architecture.json`; None if the layers of its model are unknown."""
    facts = config.model.facts
    return None if facts is None or facts.measured is None else json.dumps(asdict(facts.measured)) + "\n"


def config_to_yaml(config: RunConfig) -> str:
    """A configuration as YAML text that `load_config` reads, with the folder where its relative paths start."""
    content = plain(config) | {TYPED_IN_KEY: str(typed_in(config))}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def load_config(file: Path) -> RunConfig:
    """Read a frozen `run.yaml`. Raises: RequestError if it is missing, damaged or of another version's schema."""
    architecture = file.with_name(ARCHITECTURE_FILE)
    try:
        config, folder = copy.deepcopy(_parse(file.read_text(encoding="utf-8")))
        if architecture.is_file() and config.model.facts is not None:
            config.model.facts.measured = layers_from_json(json.loads(architecture.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise RequestError(f"{file} is not there, so this is no run folder", problem_id="no-run-folder") from error
    except (OmegaConfBaseException, YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestError(
            f"{file} cannot be read as a run's configuration: {first_line(error)}; it was edited by hand or "
            "written by another version of Tunebook",
            problem_id="no-run-folder",
        ) from error
    if Path(folder).is_dir():
        place_paths(config, Path(folder))
    return config


@lru_cache(maxsize=16)  # a command reads the run.yaml of each of its runs several times, and parsing takes 50 ms
def _parse(text: str) -> tuple[RunConfig, str]:
    """The configuration in the text of a run.yaml, and the folder where its paths start."""
    content = yaml.safe_load(text)
    folder = content.pop(TYPED_IN_KEY)
    config = OmegaConf.structured(RunConfig)
    config.parallelism = CHOICE_SCHEMAS["parallelism"][content["parallelism"]["strategy"]]
    config.method = CHOICE_SCHEMAS["method"][content["method"]["name"]]
    config.launcher = CHOICE_SCHEMAS["launcher"][content["launcher"]["name"]]
    tree: Any = OmegaConf.merge(config, _escaped(content))
    return cast(RunConfig, OmegaConf.to_object(tree)), folder


def _escaped(value: Any) -> Any:
    """Plain values escaped so that OmegaConf reads no `${` in them as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: f"{2 * match[1]}\\${{", value)
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    return value


def typed_in(config: RunConfig) -> Path:
    """The folder that a configuration's relative paths start at."""
    paths = (getattr(section, key) for section, key in _path_settings(config))
    texts = [config.recipe, *config.evaluation.tasks, *paths]
    return next((text.typed_in for text in texts if isinstance(text, PlacedPath)), Path.cwd())


def place_paths(config: RunConfig, folder: Path) -> None:
    """Make a configuration's relative paths start at a folder, whatever the working directory is.

    The texts stay unchanged, since the configuration's hash is computed from them.
    """
    for section, key in _path_settings(config):
        text = getattr(section, key)
        is_name = key in ("name", "tokenizer")  # on the hub, unless there is such a folder
        if text and is_relative(text) and not (is_name and not (folder / text).exists()):
            setattr(section, key, placed(text, folder))
    if config.recipe is not None and config.recipe.endswith(YAML_SUFFIXES):
        config.recipe = placed(config.recipe, folder)
    tasks = config.evaluation.tasks
    config.evaluation.tasks = [placed(task, folder) if is_task_file(task) else task for task in tasks]


def _path_settings(config: RunConfig) -> Iterator[tuple[Any, str]]:
    """Section and key of each setting that may hold a path."""
    yield from ((config.model, key) for key in ("path", "chat_template", "tokenizer"))
    yield config.dataset, "validation_path"
    for source in (config.dataset, *config.dataset.parts.values()):
        yield from ((source, key) for key in ("path", "name"))


def plain_config(**given_sections: Any) -> RunConfig:
    """A `RunConfig` of the given fields without Hydra; other sections have the schema's defaults, for one process.

    Nothing is resolved or checked, and there is nothing to train: no task, no learning rate, rows of no tokens.
    """
    schemas: dict[str, Any] = {
        name: schema for name, schema in get_type_hints(RunConfig).items() if is_dataclass(schema)
    }
    required: dict[str, dict[str, Any]] = {
        "parallelism": {"strategy": Strategy.single},
        "optimizer": {"learning_rate": 0.0},
        "launcher": {"name": LauncherName.local},
        "evaluation": {"tasks": []},
        "training": {"max_length": 0},
    }
    sections: dict[str, Any] = {name: schema(**required.get(name, {})) for name, schema in schemas.items()}
    return RunConfig(**sections | given_sections)
