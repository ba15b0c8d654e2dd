"""What this version plans, checks and prints, but does not start: refused before anything is prepared.

Each of these would otherwise run as something else without a word (fp8 as bf16, hsdp as plain sharding), or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebook.config.choices import Compute, LauncherName, Strategy
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem, RulesError

_PLANNED: tuple[tuple[Callable[[RunConfig], bool], Problem], ...] = (
    (
        lambda config: config.launcher.name is not LauncherName.local,
        Problem(
            id="launcher-plans-only",
            key="launcher",
            message="Slurm and Ray runs are planned and their command printed (--dry-run); runs are started on this "
            "machine only",
            fix="launcher=local",
        ),
    ),
    (
        lambda config: config.parallelism.strategy is Strategy.hsdp,
        Problem(
            id="strategy-plans-only",
            key="parallelism",
            message="hsdp is planned, but not started yet: it would run as plain full sharding",
            fix="parallelism=fsdp",
        ),
    ),
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
