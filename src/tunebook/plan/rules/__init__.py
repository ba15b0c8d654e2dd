"""The table of all cross-field rules. `check` reports all broken ones at once, before anything is downloaded.

A rule looks at the resolved configuration only (see `plan.auto.resolve`); `train.requirements` holds the requirements
on this machine. To add a rule: write it in the module of its key, and its case in `tests/plan/rules/rule_cases.py`.

    settings     ranges of all keys, and keys that the run does not read
    model, data, method, adapters (peft), optimizer (and schedule), parallelism, precision: the group of that name
    batch        training: batch, lengths and steps
    kernels      attention, packing, activation, compiled blocks
    running      the rest of training: validation, saving, resuming; evaluation; launcher

A new module also goes into `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tunebook.config.schema import RunConfig
from tunebook.errors import Problem
from tunebook.plan.rules import (
    adapters,
    batch,
    data,
    kernels,
    method,
    model,
    optimizer,
    parallelism,
    precision,
    running,
    settings,
)
from tunebook.plan.rules.frame import Rule

__all__ = ["RULES", "check", "located"]

PlaceOf = Callable[[str], str | None]
_MODULES = (settings, model, data, method, batch, precision, kernels, parallelism, adapters, optimizer, running)
# By id, in the order in which modules define them.
RULES: tuple[Rule, ...] = tuple(
    {part.id: part for module in _MODULES for part in vars(module).values() if isinstance(part, Rule)}.values()
)


def check(config: RunConfig, place_of: PlaceOf | None = None) -> list[Problem]:
    """Return all problems of a resolved configuration: errors (`is_error`) first, then warnings.

    Empty if there are none. The other rules compute with numbers, so these come first. `place_of` returns the override
    or file that set a key.
    """
    problems = settings.out_of_range.problems(config)
    problems = problems or [problem for rule in RULES for problem in rule.problems(config)]
    problems = problems if place_of is None else located(problems, place_of)
    return sorted(problems, key=lambda problem: not problem.is_error)


def located(problems: list[Problem], place_of: PlaceOf) -> list[Problem]:
    """Add to each problem what set its key."""
    return [replace(problem, place=place_of(problem.key)) for problem in problems]
