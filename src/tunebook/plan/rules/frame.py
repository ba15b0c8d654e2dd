"""What a rule is: an id and a function that looks for it in a resolved configuration.

A rule is a function under `@rule(id, key)`. What it means, why and what to do is in `errors.yaml` under that id. Every
function must survive any configuration that composes, whatever else is wrong with it, because all problems are reported
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tunebook.config.schema import RunConfig
from tunebook.errors import Problem


@dataclass(frozen=True)
class Finding:
    """One place where a rule is broken."""

    message: str  # what is wrong with the value
    fix: str  # what to type instead
    key: str | None = None  # None: the rule's


Find = Callable[[RunConfig], Finding | Iterable[Finding] | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cross-field rule."""

    id: str
    key: str | None  # that it is about; None: each finding names one
    find: Find
    is_error: bool  # False: the problem is printed, and stops nothing

    def problems(self, config: RunConfig) -> list[Problem]:
        """Every place of `config` that breaks this rule."""
        found = self.find(config) or ()
        places = [found] if isinstance(found, Finding) else found
        return [
            Problem(
                id=self.id,
                key=place.key or self.key or "",
                message=place.message,
                fix=place.fix,
                is_error=self.is_error,
            )
            for place in places
        ]


def rule(id: str, key: str | None = None, *, is_error: bool = True) -> Callable[[Find], Rule]:
    """Make a rule of the function below it."""
    return lambda find: Rule(id=id, key=key, find=find, is_error=is_error)


def another_model(config: RunConfig) -> str:
    """What to type for a model other than the one that is named, which only the user can choose."""
    return "model.path=FOLDER" if config.model.path else "model.name=ORG/NAME"


def world_size(config: RunConfig) -> int:
    """The ranks of a run; at least 1, also where a broken number is reported by its own rule."""
    return max(1, config.hardware.num_nodes) * max(1, config.hardware.gpus_per_node or 1)
