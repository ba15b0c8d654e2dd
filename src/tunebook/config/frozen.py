"""`run.yaml`: the resolved configuration as the launcher freezes it and every rank reads it.

Where it holds relative paths it names the folder that they were typed in, and whoever reads it finds what they named.
On a machine without that folder, or after it was moved, they start at the working directory, as where they are typed.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.config.choices import LauncherName, Strategy
from tunebook.config.interpolation import escaped, to_object
from tunebook.config.placing import place_paths, typed_in
from tunebook.config.schema import (
    FsdpConfig,
    LauncherConfig,
    ParallelismConfig,
    RayConfig,
    RunConfig,
    SlurmConfig,
    ZeroConfig,
)
from tunebook.config.walk import texts_of
from tunebook.errors import RequestError

_INTERPOLATION = "${"  # how one begins
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
# What was not left open before it was there: a run frozen without the key had this value.
_SINCE_DECIDED = (("model", "compile_layers", False), ("model", "one_pass_head", False))


# No key of the configuration and in no hash: the same words are the same run wherever they are typed.
TYPED_IN_KEY = "typed_in"


def bring_up_to_date(parts: dict[str, Any]) -> None:
    """Give a configuration that an earlier version wrote as plain values the form that it has today."""
    for section, key, before in _SINCE_DECIDED:
        parts[section].setdefault(key, before)
    facts = parts["model"].get("facts") or {}
    if "unreached" in (measured := facts.get("measured") or {}):
        facts["unreached"] = measured.pop("unreached")


def config_to_yaml(config: RunConfig) -> str:
    """A configuration as YAML text that `load_config` reads back equal, and where its relative paths start.

    Its values are final: a `${` in one is a text, and stays one wherever it is read.
    """
    if any(_INTERPOLATION in text for _, texts, _ in texts_of(config) for text in texts):
        config = _escaped(config)
    text: str = OmegaConf.to_yaml(OmegaConf.structured(config))
    folder = typed_in(config)
    return text if folder is None else text + OmegaConf.to_yaml(OmegaConf.create({TYPED_IN_KEY: str(folder)}))


def _escaped(value: Any) -> Any:
    """A copy of a configuration, or of a part of it, in whose texts OmegaConf finds no interpolation."""
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
    """The folder that the relative paths of a `run.yaml` start at; None where it names none or cannot be read."""
    try:
        folder: Any = OmegaConf.to_container(OmegaConf.load(file)).get(TYPED_IN_KEY)  # type: ignore[union-attr]
    except (OSError, OmegaConfBaseException, YAMLError, AttributeError):
        return None
    return Path(folder) if isinstance(folder, str) else None


def load_config(file: Path) -> RunConfig:
    """Read a frozen `run.yaml`. Raises: RequestError when it is missing, damaged or of another version's schema."""
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(file))
        folder = plain.pop(TYPED_IN_KEY, None)
        parts = {field.name: plain.pop(field.name) for field in fields(RunConfig) if field.name in plain}
        bring_up_to_date(parts)
        config = OmegaConf.structured(RunConfig)
        config.parallelism = PARALLELISM_SCHEMAS[Strategy[parts["parallelism"]["strategy"]]]
        config.launcher = LAUNCHER_SCHEMAS[LauncherName[parts["launcher"]["name"]]]
        merged: Any = to_object(OmegaConf.merge(config, parts | plain))
    except FileNotFoundError as error:
        raise RequestError(f"{file} is not there, so this is no run folder", problem_id="no-run-folder") from error
    except (OmegaConfBaseException, YAMLError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{file} cannot be read as a run's configuration: {str(error).splitlines()[0]}; it was edited by hand or "
            "written by another version of Tunebook",
            problem_id="no-run-folder",
        ) from error
    assert isinstance(merged, RunConfig)
    if isinstance(folder, str) and Path(folder).is_dir():
        place_paths(merged, Path(folder))
    return merged
