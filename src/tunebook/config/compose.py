"""Composes Hydra groups, a recipe and the user's overrides into one typed `RunConfig`.

Later ones override earlier ones: a group's file, `hydra_configs/config.yaml`, the recipes that a recipe builds on, the
recipe, the command line. Rules across fields are in `plan.rules`, and `auto` is resolved in `plan.auto.resolve`. Torch
is not imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_origin

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.book import book_root
from tunebook.config.foreign import instead_of
from tunebook.config.interpolation import guard_resolvers
from tunebook.config.messages import (
    OverrideError,
    added_or_removed,
    all_of,
    explain_composition,
    explain_missing,
    explain_value,
    secret_in_configuration,
    several_values,
    unknown_choice,
    unknown_key,
    unreadable_override,
    wrong_type,
)
from tunebook.config.origins import Origins
from tunebook.config.override_text import quoted, split_values
from tunebook.config.recipe_files import (
    RecipeFile,
    group_choices,
    load_recipes,
    store_recipes,
)
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS, RunConfig
from tunebook.config.unsafe_text import is_secret_name, known_secrets, secret_in
from tunebook.config.walk import is_in_mapping, mapping_type, texts_of, unknown_keys
from tunebook.errors import RequestError

_PLAIN = (bool, int, float, str)  # types of a single value
_OPENING = "'\"[{"  # of a value that is no plain text


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed configuration and the origins of its values."""

    config: RunConfig
    groups: dict[str, str]  # the choice of each config group
    origins: Origins


def compose(recipe: str | None, overrides: list[str], recipes_dirs: list[Path] | None = None) -> Composition:
    """Compose a run. Raises: RequestError with the key, its file or override, the allowed values and the spelling.

    The error lists all wrong overrides. Hydra stops at the first, so composing is repeated without it.
    """
    errors: list[RequestError] = []
    words = list(overrides)
    while True:
        try:
            composition = _compose(recipe, words, recipes_dirs or [])
        except OverrideError as error:
            errors.append(error)
            words = _without(words, error.word)
        except RequestError as error:
            # A value may be missing only because its override was removed above.
            if not errors or error.problem_id != "missing-value":
                errors.append(error)
            break
        else:
            if not errors:
                return composition
            break
    raise all_of(errors)


def _without(words: list[str], wrong: str) -> list[str]:
    """The overrides without a wrong one, and without those for keys of the group that it chose."""
    group = wrong.partition("=")[0]
    below = f"{group}." if group in GROUPS else None
    return [word for word in words if word != wrong and not (below and word.startswith(below))]


def _compose(recipe: str | None, overrides: list[str], recipes_dirs: list[Path]) -> Composition:
    parsed = parse_overrides(overrides)
    chain = register_configs(recipe, recipes_dirs)
    origins = Origins(recipes=chain, overrides=parsed, groups={})
    words = [override.input_line or "" for override in parsed if not _is_open(override)]
    if recipe is not None:
        words.append(f"recipes={recipe}")
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(book_root() / "hydra_configs"), version_base="1.3"):
            tree = hydra_compose("config", overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, AssertionError, OverflowError) as error:
        raise explain_composition(error, origins) from error
    groups = {group: str(tree.hydra.runtime.choices[group]) for group in GROUPS}
    origins = Origins(recipes=chain, overrides=parsed, groups=groups)
    config = _typed(tree, origins)
    config.recipe = recipe
    return Composition(config=config, groups=groups, origins=origins)


def register_configs(recipe: str | None, recipes_dirs: list[Path]) -> list[RecipeFile]:
    """Hand the schemas and the recipe (with its parents) to Hydra; returns the recipe files, the recipe first."""
    store = ConfigStore.instance()
    if "schema" not in store.repo:  # a plan composes up to ten runs in one process
        store.store(group="schema", name="config", node=RunConfig, package="_global_")
        for place, schema in CHOICE_SCHEMAS.items():
            group, name = place.rsplit("/", 1)
            store.store(group=f"schema/{group}", name=name, node=schema)
    chain = load_recipes(recipe, recipes_dirs) if recipe is not None else []
    store_recipes(chain)
    return chain


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Parse `key=value` words. Raises: RequestError for words that are not overrides of the schema's keys."""
    parsed: list[Override] = []
    for text in overrides:
        if text.startswith(("+", "~")):
            raise added_or_removed(text)
        if text.startswith("="):
            raise unreadable_override(text)
        try:
            override = _parsed(text)
        except HydraException as error:
            raise unreadable_override(text) from error
        _check_override(override, text)
        parsed.append(override)
    return parsed


def _parsed(text: str) -> Override:
    """One override as typed. Raises: HydraException if it is none, also with quotes around its value."""
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException:
        key, _, value = text.partition("=")
        if value.startswith("[") and value.endswith("]"):
            entries = [entry.strip() for entry in split_values(value[1:-1])]
            listed = [entry if entry[0] in _OPENING else quoted(entry) for entry in entries if entry]
            return parser.parse_override(f"{key}=[{','.join(listed)}]")
        if not value or value[0] in _OPENING or not set(value).isdisjoint("[]{}"):
            raise
        return parser.parse_override(f"{key}={quoted(value)}")


def _check_override(override: Override, text: str) -> None:
    key, typed_value = override.key_or_group, text.partition("=")[2]
    if key in ("recipe", "recipes"):
        raise OverrideError(
            text,
            f"override '{text}': name the recipe as the first word, such as `tunebook train {override.value()}`",
            problem_id="override-form",
        )
    if key.startswith("hydra"):
        message = f"override '{text}': Hydra's own keys are set by Tunebook{instead_of(key, typed_value)}"
        raise OverrideError(text, message, problem_id="override-form")
    if override.is_sweep_override():
        raise several_values(key, text)
    if key in GROUPS and (choice := override.value()) not in group_choices(key):
        if isinstance(choice, dict):
            return
        raise unknown_choice(key, typed_value, f"override '{text}'", word=text)


def _is_open(override: Override) -> bool:
    return is_in_mapping(override.key_or_group)


def _merge_open(tree: DictConfig, origins: Origins) -> DictConfig:
    """The tree with the overrides of mappings whose names the user chooses, in the order they were typed.

    Hydra's overrides cannot add names. An empty mapping removes those of the recipe.
    Raises: RequestError for a value of another form than the mapping, which OmegaConf would let pass.
    """
    for override in filter(_is_open, origins.overrides):
        key, value, kind = override.key_or_group, cast(Any, override.value()), mapping_type(override.key_or_group)
        is_whole = get_origin(kind) is dict
        if (is_whole and not isinstance(value, dict)) or (kind in _PLAIN and isinstance(value, dict | list)):
            raise wrong_type(key, origins)
        if value == {} and is_whole and OmegaConf.select(tree, key):
            OmegaConf.update(tree, key, {}, merge=False)
            continue
        for part in reversed(key.split(".")):
            value = {part: value}
        with open_dict(tree):
            merged = OmegaConf.merge(tree, value)
        assert isinstance(merged, DictConfig)
        tree = merged
    return tree


def _typed(tree: DictConfig, origins: Origins) -> RunConfig:
    """The composed tree as dataclasses. Raises: RequestError for unknown keys and missing required values."""
    with open_dict(tree):
        del tree["hydra"]
    guard_resolvers()
    try:
        tree = _merge_open(tree, origins)
        for key, owner in unknown_keys(tree):
            raise unknown_key(key, owner, origins)
        if missing := sorted(OmegaConf.missing_keys(tree)):
            raise explain_missing(missing)
        config: Any = OmegaConf.to_object(tree)
    except (OmegaConfBaseException, OverflowError) as error:  # OverflowError: integers of hundreds of digits
        raise explain_value(error, origins) from error
    assert isinstance(config, RunConfig)
    _refuse_secrets(config, origins)
    return config


def _refuse_secrets(config: RunConfig, origins: Origins) -> None:
    """Raises: RequestError for a text that contains a secret of the environment, wherever it came from."""
    secrets = known_secrets(os.environ)  # once, for a hundred texts
    for key, values, _ in texts_of(config):
        for value in values:
            if found := secret_in(value, secrets):
                raise secret_in_configuration(key, found, origins)
    for variable in getattr(config.launcher, "env_vars", []):
        name, _, value = variable.partition("=")
        if value and is_secret_name(name):
            raise secret_in_configuration("launcher.env_vars", f"a value for {name}", origins)
