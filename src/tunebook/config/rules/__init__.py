"""Every cross-field rule, as one table. `check` reports all broken ones at once, before anything is downloaded.

A rule looks at the resolved configuration only (see `config.auto`); what this machine must have for it stands in
`rules.environment`. Adding a rule: write it in the module of its topic, list it in that module's `RULES`, and add its
case to `tests/config/test_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tunebook.config.rules import (
    attention,
    batch,
    launching,
    numbers,
    optimizing,
    parallelism,
    precision,
    quantised,
    running,
    sources,
)
from tunebook.config.rules.environment import check_environment
from tunebook.config.rules.frame import Rule
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem

__all__ = ["RULES", "check", "check_environment"]

RULES: tuple[Rule, ...] = (
    *numbers.RULES,
    *sources.RULES,
    *batch.RULES,
    *precision.RULES,
    *attention.RULES,
    *parallelism.RULES,
    *optimizing.RULES,
    *quantised.RULES,
    *running.RULES,
    *launching.RULES,
)


def check(config: RunConfig, place_of: Callable[[str], str | None] | None = None) -> list[Problem]:
    """Everything to say against a resolved configuration: what stops it (`is_error`), then what is only unwise.

    `place_of` says which override or file set a key. Empty when the configuration is sound.
    """
    problems = [problem for rule in RULES for problem in rule.problems(config)]
    if place_of is not None:
        problems = [replace(problem, place=place_of(problem.key)) for problem in problems]
    return sorted(problems, key=lambda problem: not problem.is_error)
