"""The rule about single numbers. Other modules have the rules that relate numbers to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tunebook.config.ranges import demand
from tunebook.config.schema import RunConfig
from tunebook.errors import RulesError
from tunebook.plan.rules.frame import Finding, rule


@rule("out-of-range")
def out_of_range(config: RunConfig) -> Iterator[Finding]:
    """Require every number to be in its range of the schema.

    Others crash deep inside a library, or train something other than what was meant.
    """
    for key, value, setting in _numbers("", config):
        if (wanted := demand(setting, value)) is not None:
            yield Finding(f"{value} must be {wanted}", key, f"{key}=VALUE")


def require_ranges(config: RunConfig) -> None:
    """Refuse numbers outside their ranges before anything is computed from them. Raises: RulesError."""
    problems = out_of_range.problems(config)
    if problems:
        raise RulesError(problems)


def _numbers(above: str, section: Any) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """The key, value and field of every number that is not null, and of each entry of a mapping of numbers."""
    for setting in dataclasses.fields(section):
        key, value = f"{above}{setting.name}", getattr(section, setting.name)
        entries = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        for place, entry in entries.items():
            if isinstance(entry, int | float) or (isinstance(value, dict) and "limits" in setting.metadata):
                yield place, entry, setting
            elif dataclasses.is_dataclass(entry):
                yield from _numbers(f"{place}.", entry)
