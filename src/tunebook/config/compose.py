"""Composes Hydra groups, a recipe and the user's overrides into one typed `RunConfig`.

Later ones override earlier ones: a group's file, `hydra_configs/config.yaml`, the recipes that a recipe builds on, the
recipe, the command line. Rules across fields are in `plan.rules`, and `auto` is resolved in `plan.auto.resolve`. Torch
is not imported.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from tunebook.config.book import book_root
from tunebook.config.foreign import instead_of
from tunebook.config.identity import flat
from tunebook.config.keys import ABSENT, all_keys, texts_of, value_at
from tunebook.config.messages import Layer, all_of, unknown_choice, wrong_value
from tunebook.config.override_text import quoted, typed
from tunebook.config.recipe_files import group_choices, load_recipes, model_keys
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS, RunConfig
from tunebook.config.unsafe_text import is_secret_name, shown, without_secrets
from tunebook.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed configuration and the origins of its values."""

    config: RunConfig
    groups: dict[str, str]  # the choice of each config group
    choosers: dict[str, str]  # what made it; no entry: it is the default
    layers: list[Layer]  # the strongest last

    def set_by(self, key: str) -> str | None:
        """The override or recipe that set a dotted key, or that chose its group's file; None for a default."""
        return place_of(key, self.layers) or self.choosers.get(key.partition(".")[0])


def place_of(key: str, layers: list[Layer]) -> str | None:
    """The override or recipe that set a dotted key itself."""
    return next((layer.place for layer in reversed(layers) if value_at(layer.values, key) is not ABSENT), None)


def compose(recipe: str | None, overrides: list[str], recipes_dirs: list[Path] | None = None) -> Composition:
    """Compose a run. Raises: RequestError with every wrong override or the first wrong value of a recipe."""
    choices: dict[str, tuple[str, str]] = {}  # of each group: the choice, and what made it
    layers: list[Layer] = []
    for file in load_recipes(recipe, recipes_dirs or []) if recipe is not None else []:
        choices |= {group: (choice, str(file.file)) for group, choice in file.choices.items()}
        layers += [Layer(place=str(file.file), values={key: value}) for key, value in file.body.items()]
    for override in parse_overrides(overrides):
        key, value, text = override.key_or_group, override.value(), (override.input_line or "").partition("=")[2]
        place = f"override '{shown(override.input_line or '')}'"
        if key in GROUPS and not isinstance(value, dict):
            choices[key] = (value if isinstance(value, str) else text, place)
        else:
            layers.append(Layer(place=place, values=_nested(key, value), typed=text))
    model, place = choices.get("model", ("", ""))
    own_model = None if model in group_choices("model") else model_keys(model) if model else {}
    if own_model is not None:  # below a recipe's own values, as the file of a choice is
        layers.insert(0, Layer(place=place, values={"model": own_model}))
    of_book = {group: made for group, made in choices.items() if group != "model" or own_model is None}
    wrong = [unknown_choice(group, *made) for group, made in of_book.items() if made[0] not in group_choices(group)]
    if wrong:
        raise all_of(wrong)
    words = [f"{group}={choice}" for group, (choice, _) in of_book.items()]
    tree, groups = _compose_groups(book_root(), frozenset(words))
    if own_model:
        groups = groups | {"model": model}
    config = _typed(_merged(tree, layers, groups), layers)
    config.recipe = recipe
    choosers = {group: place for group, (_, place) in choices.items()}
    return Composition(config=config, groups=groups, choosers=choosers, layers=layers)


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Parse `key=value` words. Raises: RequestError with all that are no overrides of one value."""
    parsed: list[Override] = []
    errors: list[RequestError] = []
    for text in overrides:
        try:
            override = parse_override(text)
            if override.is_sweep_override():
                raise _wrong_form(text, _of_several_values(*text.split("=", 1)))
            parsed.append(override)
        except RequestError as error:
            errors.append(error)
    if errors:
        raise all_of(errors)
    return parsed


def _of_several_values(key: str, value: str) -> str:
    setting, each = all_keys().get(key), "for one run each: tunebook sweep"
    if setting is None and (instead := instead_of(key, value)):
        return instead
    if setting is not None and str(setting.type).startswith("list"):
        return f"a list is typed {shlex.quote(f'{key}=[{value}]')}; {each}"
    return f"lists several values; {each}; for one text with commas: type {typed(key, value)}"


def parse_override(text: str) -> Override:
    """Parse `key=value`. A value, or an entry of a list, that Hydra's grammar does not read is taken as a text.

    Raises: RequestError for another form.
    """
    key, has_value, value = text.partition("=")
    if text.startswith(("+", "~")):
        above = ".".join(key.lstrip("+").split(".")[:2])  # also of names that are the user's: dataset.parts.NAME.path
        own = text.lstrip("+") if above in all_keys() else "training.seed=1"
        raise _wrong_form(text, instead_of(key.strip("+~"), value) or f"settings are not added or removed: type {own}")
    if not (key and has_value):
        message = "a setting is typed key=value without spaces, such as training.seed=1"
        raise _wrong_form(text, instead_of(key) or message)
    if key in ("recipe", "recipes"):
        raise _wrong_form(text, f"name the recipe as the first word, such as `tunebook train {value}`")
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    quoted_value = f"[{','.join(quoted(entry.strip()) for entry in inner.split(','))}]" if is_list else quoted(value)
    is_plain = bool(inner) and inner[0] not in "'\"" and set(inner).isdisjoint("[]{}")
    for attempt in (text, f"{key}={quoted_value}") if is_plain else (text,):
        with suppress(HydraException):
            return OverridesParser.create().parse_override(attempt)
    raise _wrong_form(text, "its brackets or quotes do not match, or an entry needs quotes")


def _wrong_form(text: str, message: str) -> RequestError:
    return RequestError(f"override '{text}': {message}", problem_id="override-form")


@lru_cache(maxsize=64)  # Hydra takes 0.2 s, and many runs of one sweep or comparison have the same choices
def _compose_groups(book: Path, choices: frozenset[str]) -> tuple[DictConfig, dict[str, str]]:
    """What Hydra composes of config.yaml and the groups' files, and the choice of each group."""
    store = ConfigStore.instance()
    store.store(group="schema", name="config", node=RunConfig, package="_global_")
    for group, schemas in CHOICE_SCHEMAS.items():
        for choice, schema in schemas.items():
            store.store(group=f"schema/{group}", name=choice, node=schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(book / "hydra_configs"), version_base="1.3"):
            tree = hydra_compose("config", overrides=sorted(choices), return_hydra_config=True)
    except HydraException as error:  # a group's file is wrong; the message names it
        lines = " ".join(str(error).splitlines()[:2])
        raise RequestError(f"{book / 'hydra_configs'}: {lines}", problem_id="cannot-compose") from error
    groups = {group: str(tree.hydra.runtime.choices[group]) for group in GROUPS}
    OmegaConf.set_struct(tree, False)
    del tree["hydra"]
    OmegaConf.set_struct(tree, None)  # so that mappings take new names; sections refuse unknown keys by their types
    return tree, groups


def _merged(tree: DictConfig, layers: list[Layer], groups: dict[str, str]) -> DictConfig:
    errors: list[RequestError] = []
    for layer in layers:
        try:
            tree = cast(DictConfig, OmegaConf.merge(tree, layer.values))
            for key, value in flat(layer.values):  # two values that merging passes over
                is_mapping = value == {} and OmegaConf.get_type(OmegaConf.select(tree, key)) is dict
                if is_mapping or value == MISSING:
                    OmegaConf.update(tree, key, value, merge=False)
        except (OmegaConfBaseException, OverflowError) as error:  # OverflowError: integers of hundreds of digits
            errors.append(wrong_value(error, layer, groups))
    if errors:
        raise all_of(errors)
    return tree


def _typed(tree: DictConfig, layers: list[Layer]) -> RunConfig:
    """The composed tree as dataclasses. Raises: RequestError for missing required values, and for secrets."""
    guard_resolvers()
    try:
        if missing := sorted(OmegaConf.missing_keys(tree)):
            listed = "\n".join(f"  {key}=VALUE" for key in missing)
            raise RequestError(f"these values are required:\n{listed}", problem_id="missing-value")
        config = OmegaConf.to_object(tree)
        assert isinstance(config, RunConfig)
    except (OmegaConfBaseException, OverflowError) as error:
        place = place_of(str(getattr(error, "full_key", "")), layers) or "hydra_configs"
        raise wrong_value(error, Layer(place=place, values={}), {}) from error
    secret = [key for key, text in texts_of(asdict(config)) if without_secrets(text) != text]
    if secret:
        raise RequestError(
            f"{secret[0]} holds a secret, and a configuration is written to run.yaml, manifest.json and the report. "
            "Leave it out: HF_TOKEN and WANDB_API_KEY reach the ranks by themselves; set others as variables on the "
            "machines of the run",
            problem_id="secret-in-configuration",
        )
    return config


def guard_resolvers() -> None:
    """Restrict interpolations to other keys and to variables of the environment that are not secret by their names.

    Others may have written a recipe, and what it reads is written to run.yaml and the report. The name of a variable
    may be the result of another interpolation, so the check is in the resolver. Hydra registers its own resolvers, such
    as the clock, with every composition.
    """
    OmegaConf.clear_resolvers()
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)


def _read_variable(name: str, *default: Any) -> str | None:
    if is_secret_name(name):
        raise ValueError(f"a configuration may not read {name}; tokens are read where they are needed")
    return oc.env(name, *default)
