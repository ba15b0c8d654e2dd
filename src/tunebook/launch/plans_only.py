"""What this version plans, checks and prints, but does not start: refused before anything is prepared.

It would otherwise run as something else without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebook.config.choices import Compute
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem, RulesError

_PLANNED: tuple[tuple[Callable[[RunConfig], bool], Problem], ...] = (
    (
        lambda config: config.precision.compute is Compute.fp8,
        Problem(
            id="fp8-plans-only",
            key="precision",
            message="fp8 is planned, but not started yet: it would run as bf16",
            fix="precision=bf16",
        ),
    ),
)


def refuse_plans_only(config: RunConfig) -> None:
    """Raise RulesError naming everything of a resolved configuration that can only be planned yet."""
    if problems := [problem for is_asked, problem in _PLANNED if is_asked(config)]:
        raise RulesError(problems)
