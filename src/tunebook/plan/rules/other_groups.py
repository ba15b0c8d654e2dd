"""What must no longer be typed where a fix chooses another group: settings that it has not, or that undo the choice.

Rules see what a configuration came to and not what was typed, so it is added to their fixes where both are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum

from tunebook.config.recipe_files import choice_schema, choice_values, group_choices
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS, RunConfig
from tunebook.config.walk import field_types, schemas_of

PlaceOf = Callable[[str], str | None]
_OR = " or "


def with_what_to_leave_out(fix: str, config: RunConfig, place_of: PlaceOf) -> str:
    """A fix whose ways out each end in `without KEY` for the typed keys that do not go with the groups it chooses."""
    return _OR.join(_way_out(way, config, place_of) for way in fix.split(_OR))


def _way_out(way: str, config: RunConfig, place_of: PlaceOf) -> str:
    pairs = dict(word.split("=", 1) for word in way.split() if "=" in word)
    misfits = [
        key
        for group, choice in pairs.items()
        if group in GROUPS and choice in group_choices(group)
        for key in _misfits(group, choice, config)
        if key not in pairs and (place_of(key) or "").startswith(f"override '{key}=")
    ]
    return way + (f" without {', '.join(misfits)}" if misfits else "")


def _misfits(group: str, choice: str, config: RunConfig) -> Iterator[str]:
    """Keys of the group as it is that another choice of it does not know, or states another answer for."""
    kind = choice_schema(group, choice)
    schema = schemas_of(group)[0] if kind is None else CHOICE_SCHEMAS[f"{group}/{kind}"]
    known, settings = field_types(schema), getattr(config, group)
    stated = {field.name: field.default.name for field in fields(schema) if isinstance(field.default, Enum)}
    stated |= choice_values(group, choice)
    for name in field_types(type(settings)):
        value = getattr(settings, name)
        # Of what is stated only what names something: numbers and switches tune a choice, and may stay as they are.
        if name not in known or (isinstance(value, Enum) and stated.get(name, value.name) != value.name):
            yield f"{group}.{name}"
