"""Every cross-field rule, as one table. `check` reports all broken ones at once, before anything is downloaded.

A rule looks at the resolved configuration only (see `plan.auto.resolve`); what this machine must have for it stands in
`train.requirements`. Adding a rule: write it in the module of its topic, list it in that module's `RULES`, and add its
case to `tests/config/rule_cases.py`.
"""

from __future__ import annotations

from dataclasses import replace

from tunebook.config.schema import RunConfig
from tunebook.errors import Problem
from tunebook.plan.rules import (
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
    texts,
)
from tunebook.plan.rules.frame import Rule
from tunebook.plan.rules.other_groups import PlaceOf, with_what_to_leave_out

__all__ = ["RULES", "check"]

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
    *texts.RULES,
)


def check(config: RunConfig, place_of: PlaceOf | None = None) -> list[Problem]:
    """Everything to say against a resolved configuration: what stops it (`is_error`), then what is only unwise.

    `place_of` says which override or file set a key; with it a fix that chooses another group also says which typed
    settings do not go with that. Empty when the configuration is sound.
    """
    problems = [problem for rule in RULES for problem in rule.problems(config)]
    if place_of is not None:
        problems = [
            replace(problem, place=place_of(problem.key), fix=with_what_to_leave_out(problem.fix, config, place_of))
            for problem in problems
        ]
    return sorted(problems, key=lambda problem: not problem.is_error)
