"""The rule about single numbers. Other modules have the rules that relate numbers to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tunebook.config.ranges import Range, range_of
from tunebook.config.schema import RunConfig
from tunebook.errors import RulesError
from tunebook.plan.rules.frame import Finding, rule


@rule("out-of-range")
def out_of_range(config: RunConfig) -> Iterator[Finding]:
    """Require every number to be in its range of the schema.

    Others crash deep inside a library, or train something other than what was meant.
    """
    for key, value, limits in _numbers("", config):
        demand = limits.demand(value)
        if demand is not None:
            fix = "model.facts=null" if key.startswith("model.facts.") else f"{key}={limits.usual}"
            yield Finding(f"{value} must be {demand}", key, fix)


def require_ranges(config: RunConfig) -> None:
    """Refuse numbers outside their ranges before anything is computed from them. Raises: RulesError."""
    problems = out_of_range.problems(config)
    if problems:
        raise RulesError(problems)


def _numbers(prefix: str, section: Any) -> Iterator[tuple[str, float, Range]]:
    """The key, value and range of every number of a configuration that is not null."""
    for setting in dataclasses.fields(section):
        key, value, limits = f"{prefix}{setting.name}", getattr(section, setting.name), range_of(setting)
        entries = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        for place, entry in entries.items():
            if limits is not None and isinstance(entry, int | float):
                yield place, entry, limits
            elif dataclasses.is_dataclass(entry):
                yield from _numbers(f"{place}.", entry)
