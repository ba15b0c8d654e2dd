"""The table of all cross-field rules. `check` reports all broken ones at once, before anything is downloaded.

`refuse_before_tracing` reports those that hold for any layers of the model, which are slow to trace.

A rule looks at the resolved configuration only (see `plan.auto.resolve`); `train.requirements` holds the requirements
on this machine. To add a rule: write it in the module of its topic, and its case in `tests/plan/rules/rule_cases.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from enum import Enum
from typing import Any, NoReturn

from tunebook.config.recipe_files import choice_schema, choice_values, group_choices
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS, RunConfig
from tunebook.config.walk import field_types, schemas_of
from tunebook.errors import Problem, RulesError
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

__all__ = ["RULES", "check", "located", "refuse_before_tracing"]

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
    problems = problems if place_of is None else located(problems, config, place_of)
    return sorted(problems, key=lambda problem: not problem.is_error)


def located(problems: list[Problem], config: RunConfig, place_of: PlaceOf) -> list[Problem]:
    """Add to each problem what set its key, and to its fix the typed settings that conflict with it."""
    return [
        replace(problem, place=place_of(problem.key), fix=with_conflicting_keys(problem.fix, config, place_of))
        for problem in problems
    ]


class _UnknownError(AttributeError):
    """A rule reads a value that depends on the model's layers. Rules that go through all values pass over it."""


def refuse_before_tracing(config: RunConfig, unknown: Iterable[str]) -> None:
    """Judge the rules that read no key of `unknown`. Raises: RulesError with every broken one, and the warnings."""
    for key in unknown:
        config = _without(config, key)
    problems: list[Problem] = []
    for rule in RULES:
        with suppress(_UnknownError):
            problems += rule.problems(config)
    if any(problem.is_error for problem in problems):
        raise RulesError(sorted(problems, key=lambda problem: not problem.is_error))


def _without(section: Any, key: str) -> Any:
    """A copy of a section of the configuration in which reading a dotted key raises _UnknownError."""

    def refuse(_: Any) -> NoReturn:
        raise _UnknownError

    section, (name, _, rest) = copy.copy(section), key.partition(".")
    if rest:
        setattr(section, name, _without(getattr(section, name), rest))
    else:
        section.__class__ = type(type(section).__name__, (type(section),), {name: property(refuse)})
    return section


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
