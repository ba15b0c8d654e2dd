"""Errors of OmegaConf about a key or a value, with its origin and the nearest spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from tunebook.config.foreign import instead_of, names
from tunebook.config.keys import ABSENT, all_keys, settings_of, value_at
from tunebook.config.override_text import as_typed, shell_command
from tunebook.config.recipe_files import group_choices
from tunebook.config.schema import CHOICE_SCHEMAS
from tunebook.errors import RequestError, did_you_mean, first_line, nearest

# What OmegaConf says of a wrong value, in our words.
_PLAIN = (
    (r"Value '(.*?)'.* to Integer", "'{}' is not a whole number"),
    (r"Value '(.*?)'.* to Float", "'{}' is not a number"),
    (r"Value '(.*?)' is not a valid bool", "'{}' is neither true nor false"),
    (r"not a ListConfig", "a list is typed [a,b]"),
    (r"\(ListConfig\) is not a valid input", "it takes one value, not a list"),
    (r"Cannot assign .* to Dict", "a mapping is typed {{name: value}}"),
    (r"Merge error: .* is not a subclass of", "this is a group of settings; type one of its keys"),
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The values of a recipe or an override, and the file or the override as it was typed."""

    place: str
    values: dict[str, Any]
    typed: str | None = None  # the value of an override as it was typed


def all_of(errors: list[RequestError]) -> RequestError:
    """Several errors as one numbered list; a single error unchanged."""
    if len(errors) == 1:
        return errors[0]
    lines = [f"  {number}. {error.message}   [{error.problem_id}]" for number, error in enumerate(errors, 1)]
    return RequestError("\n".join([f"{len(errors)} problems", *lines]), problem_id=errors[0].problem_id)


def unknown_choice(group: str, choice: str, place: str) -> RequestError:
    """The error for a choice that a group does not have."""
    missing = f"there is no {group} '{choice}'"
    if group == "model":
        missing = f"'{choice}' is no model of the book, no folder and no ORG/NAME of the hub"
    hint = did_you_mean(choice, group_choices(group), f"All choices: tunebook explain {group}")
    message = f"{missing}.{hint}"
    if group == "dataset" and (Path(choice).suffix or Path(choice).exists()):
        message = f"{missing}; a file or folder is typed without a key: {shell_command([choice])}"
    elif f"{group}={choice}".lower() in names() or nearest(choice, group_choices(group)) is None:
        message = instead_of(group, choice, missing=missing) or message
    return RequestError(f"{place}: {message}", problem_id="unknown-choice")


def wrong_value(error: Exception, layer: Layer, groups: dict[str, str]) -> RequestError:
    """The error for a key or a value of a layer that the schema refuses."""
    key, text = str(getattr(error, "full_key", None) or ""), first_line(error)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(key, getattr(error, "object_type", None), layer, groups)
    if match := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        choices = match[2].split(", ")
        text = f"there is no '{match[1]}'"
        name = key.rpartition(".")[2]
        if f"{name}={match[1]}".lower() in names():  # not a nearly equal name of another thing
            text = instead_of(name, match[1], missing=text)
        else:
            text += f".{did_you_mean(match[1], choices, f'Type one of: {match[2]}')}"
    elif match := re.search(r"Interpolation key '(.*)' not found", text):
        text += f".{did_you_mean(match[1], all_keys())}"
    else:
        found = ((re.search(pattern, text), plain) for pattern, plain in _PLAIN)
        text = next((plain.format(*match.groups()) for match, plain in found if match), text)
    return RequestError(f"{layer.place}: {f'{key}: ' if key else ''}{text}", problem_id="wrong-type")


def _unknown_key(key: str, owner: Any, layer: Layer, groups: dict[str, str]) -> RequestError:
    """The error for a key that the schema does not have: of another choice or tool, or a misspelling."""
    value, typed_key = value_at(layer.values, key), key
    if value is ABSENT and key in all_keys():
        return _no_key(layer, f"'{key}' is written with a dot, as only overrides are; indent it below its section")
    while isinstance(value, dict) and len(value) == 1:  # of `trainin.max_length=4`, the unknown key is `trainin`
        name, value = next(iter(value.items()))
        typed_key += f".{name}"
    if instead := instead_of(typed_key, layer.typed or as_typed(value)):
        return _no_key(layer, instead)
    group, _, name = key.partition(".")
    schemas = CHOICE_SCHEMAS.get(group, {})
    if having := [choice for choice, schema in schemas.items() if name in _names(schema)]:
        listed = ", ".join(f"{group}={choice}" for choice in having)
        return _no_key(layer, f"{key} has no meaning with {group}={groups[group]}; it belongs to {listed}")
    above, dot, name = key.rpartition(".")
    near = nearest(name, _names(owner))
    known = [f"{above}{dot}{near}"] if near else [known for known in all_keys() if "." in known or not above]
    listing = f"explain {group}" if group in all_keys() else "explain all"
    return _no_key(layer, f"there is no key '{key}'.{did_you_mean(key, known, f'All keys: tunebook {listing}')}")


def _no_key(layer: Layer, message: str) -> RequestError:
    return RequestError(f"{layer.place}: {message}", problem_id="unknown-key")


def _names(schema: Any) -> list[str]:
    return [setting.name for setting in settings_of(schema)] if is_dataclass(schema) else []
