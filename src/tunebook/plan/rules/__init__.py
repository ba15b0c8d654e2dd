"""The table of all cross-field rules. `check` reports all broken ones at once, before anything is downloaded.

A rule looks at the resolved configuration only (see `plan.auto.resolve`); `train.requirements` holds the requirements
on this machine. To add a rule: write it in the module of its topic, its texts in `errors.yaml`, and its case in
`tests/plan/rules/rule_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from enum import Enum

from tunebook.config.recipe_files import choice_schema, choice_values, group_choices
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS, RunConfig
from tunebook.config.walk import field_types, schemas_of
from tunebook.errors import Problem
from tunebook.plan.rules import (
    adapters,
    attention,
    batch,
    launching,
    numbers,
    optimizing,
    parallelism,
    precision,
    quantized,
    running,
    sources,
    tiles,
)
from tunebook.plan.rules.frame import Rule

__all__ = ["RULES", "check"]

PlaceOf = Callable[[str], str | None]
_OR = " or "
_MODULES = (
    numbers, sources, batch, precision, attention, tiles, parallelism, adapters, optimizing, quantized, running,
    launching,
)  # fmt: skip
# By id, in the order in which modules define them.
RULES: tuple[Rule, ...] = tuple(
    {part.id: part for module in _MODULES for part in vars(module).values() if isinstance(part, Rule)}.values()
)


def check(config: RunConfig, place_of: PlaceOf | None = None) -> list[Problem]:
    """Return all problems of a resolved configuration: errors (`is_error`) first, then warnings.

    Empty if there are none. `place_of` returns the override or file that set a key. With it, a fix that chooses another
    group also names the typed settings that conflict with that group.
    """
    problems = [problem for rule in RULES for problem in rule.problems(config)]
    if place_of is not None:
        problems = [
            replace(problem, place=place_of(problem.key), fix=with_conflicting_keys(problem.fix, config, place_of))
            for problem in problems
        ]
    return sorted(problems, key=lambda problem: not problem.is_error)


def with_conflicting_keys(fix: str, config: RunConfig, place_of: PlaceOf) -> str:
    """Append `without KEY` to each alternative of a fix, for typed keys that conflict with its groups."""
    return _OR.join(_alternative_with_conflicts(way, config, place_of) for way in fix.split(_OR))


def _alternative_with_conflicts(way: str, config: RunConfig, place_of: PlaceOf) -> str:
    pairs = dict(word.split("=", 1) for word in way.split() if "=" in word)
    misfits = [
        key
        for group, choice in pairs.items()
        if group in GROUPS and choice in group_choices(group)
        for key in _conflicting_keys(group, choice, config)
        if key not in pairs and (place_of(key) or "").startswith(f"override '{key}=")
    ]
    return way + (f" without {', '.join(misfits)}" if misfits else "")


def _conflicting_keys(group: str, choice: str, config: RunConfig) -> Iterator[str]:
    """Keys of the current group that another choice lacks or sets to another value."""
    kind = choice_schema(group, choice)
    schema = schemas_of(group)[0] if kind is None else CHOICE_SCHEMAS[f"{group}/{kind}"]
    known, settings = field_types(schema), getattr(config, group)
    stated = {field.name: field.default.name for field in fields(schema) if isinstance(field.default, Enum)}
    stated |= choice_values(group, choice)
    for name in field_types(settings.__class__):
        value = getattr(settings, name)
        # Only enum values conflict: numbers and switches tune a choice, and may stay.
        if name not in known or (isinstance(value, Enum) and stated.get(name, value.name) != value.name):
            yield f"{group}.{name}"
