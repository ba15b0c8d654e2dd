"""What a rule is: an id, why it exists, and a function that looks for it in a resolved configuration.

A rule is written as a function under `@rule(...)`, so that its texts stand where its condition stands. Every function
must survive any configuration that composes, whatever else is wrong with it: all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from tunebook.config.schema import RunConfig
from tunebook.errors import Problem


class Level(Enum):
    """Whether a broken rule stops the run or is only printed."""

    error = "error"
    warning = "warning"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place where a rule is broken: the key, what is wrong with its value, and what to type instead."""

    key: str
    message: str
    fix: str


Findings = Finding | Iterable[Finding] | None
Find = Callable[[RunConfig], Findings]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `tunebook explain` says of one id."""

    summary: str
    why: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cross-field rule."""

    id: str
    level: Level
    explanation: Explanation
    find: Find

    def problems(self, config: RunConfig) -> list[Problem]:
        """Every place of `config` that breaks this rule."""
        findings = self.find(config)
        if findings is None:
            return []
        places = [findings] if isinstance(findings, Finding) else findings
        is_error = self.level is Level.error
        return [
            Problem(id=self.id, key=place.key, message=place.message, fix=place.fix, is_error=is_error)
            for place in places
        ]


def rule(
    id: str, *, summary: str, why: str, advice: str, level: Level = Level.error
) -> Callable[[Find], Rule]:  # fmt: skip
    """Make a rule of the function below it."""

    def make(find: Find) -> Rule:
        explanation = Explanation(summary=summary, why=why, advice=advice)
        return Rule(id=id, level=level, explanation=explanation, find=find)

    return make


def another_model(config: RunConfig) -> str:
    """What to type for a model other than the one that is named, which only the user can choose."""
    return "model.path=FOLDER" if config.model.path else "model.name=ORG/NAME"


def world_size(config: RunConfig) -> int:
    """The ranks of a run; at least 1, also where a broken number is reported by its own rule."""
    return max(1, config.hardware.num_nodes) * max(1, config.hardware.gpus_per_node or 1)
