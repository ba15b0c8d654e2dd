"""The keys of the schema, and the values and texts below them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from tunebook.config.schema import CHOICE_SCHEMAS, RunConfig

Setting = dataclasses.Field[Any]

ABSENT = "absent"  # the value of a key that is not there
PART = "NAME"  # stands for the names that users give to the parts of a mixture


@cache
def all_keys() -> dict[str, Setting]:
    """Every dotted key of a run's configuration with its field, over all choices of all groups."""
    return {key: setting for _, key, setting in keys_with_owners()}


def keys_with_owners(schema: Any = RunConfig, above: str = "") -> Iterator[tuple[Any, str, Setting]]:
    """Every dotted key with its dataclass and its field; one that several choices of a group have, once for each."""
    hints = typing.get_type_hints(schema)
    for setting in settings_of(schema):
        key, hint = f"{above}{setting.name}", hints[setting.name]
        yield schema, key, setting
        below = f"{key}.{PART}." if typing.get_origin(hint) is dict else f"{key}."
        # `int | None` and `dict[str, int]` have their types as arguments.
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                for section in (part, *CHOICE_SCHEMAS.get(key, {}).values()):
                    yield from keys_with_owners(section, below)


def settings_of(schema: Any) -> list[Setting]:
    """The fields of a dataclass of the schema that are settings."""
    return [field for field in dataclasses.fields(schema) if not field.metadata.get("omegaconf_ignore")]


def value_at(values: Any, key: str) -> Any:
    """The value of a dotted key in nested dictionaries; ABSENT if it is not there."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return ABSENT
        values = values[part]
    return values


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a configuration (as a dictionary) with its dotted key, also the names of a mapping's entries."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item, key)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield key, str(name)
            yield from texts_of(entry, f"{key}.{name}" if key else str(name))
