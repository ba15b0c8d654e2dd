"""Rules about single numbers. Other modules have the rules that relate numbers to each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunebook.config.ranges import MAPPING_RANGES, MOST, PART_RANGES, RANGES, Range, is_finite, number_text
from tunebook.config.schema import RunConfig
from tunebook.errors import RulesError
from tunebook.plan.rules.frame import Finding, read_key, rule


def refuse_absurd(config: RunConfig) -> None:
    """Refuse numbers beyond `MOST`, which no plan can compute with, before any decision uses them.

    Raises: RulesError that lists all of them.
    """
    problems = out_of_range.problems(config)
    absurd = [problem for problem in problems if _is_absurd(read_key(config, problem.key))]
    if absurd:
        raise RulesError(absurd)


def _is_absurd(value: Any) -> bool:
    return isinstance(value, int | float) and not (is_finite(value) and abs(value) <= MOST)


def _outside(range_: Range, key: str, value: Any) -> Finding | None:
    if value is None or isinstance(value, str) or range_.holds(value):
        return None
    fix = range_.instead or f"{key}={range_.usual}"
    return Finding(f"{number_text(value)} must be {range_.demand(value)}", fix, key=key)


@rule("out-of-range")
def out_of_range(config: RunConfig) -> Iterator[Finding]:
    """Require every number of `config.ranges`, and of each part of a mixture, to be in its range.

    Others crash deep inside a library, or train something other than what was meant.
    """
    places = [(range_, range_.key, read_key(config, range_.key)) for range_ in RANGES]
    for name, part in config.dataset.parts.items():
        places += [(each, f"dataset.parts.{name}.{each.key}", read_key(part, each.key)) for each in PART_RANGES]
    for each in MAPPING_RANGES:
        places += [(each, f"{each.key}.{name}", value) for name, value in read_key(config, each.key).items()]
    for range_, key, value in places:
        finding = _outside(range_, key, value)
        if finding is not None:
            yield finding
