"""The form of a rule: an id and a function that finds violations in a resolved configuration.

A rule is a function under `@rule(id, key)`. Its docstring says what it refuses and why (`tunebook explain ID`). Every
function must handle any configuration with numbers in their ranges, since all other problems are reported at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from tunebook.config.choices import Generation
from tunebook.config.override_text import typed_list
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem


@dataclass(frozen=True)
class Finding:
    """One violation of a rule."""

    message: str  # what is wrong with the value
    fix: str  # what to type instead
    key: str | None = None  # None: the rule's key


Find = Callable[[RunConfig], Finding | Iterable[Finding] | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cross-field rule."""

    id: str
    why: str  # what it refuses and why, for `tunebook explain`
    key: str | None  # key of the rule; None: each finding names one
    find: Find
    is_error: bool  # False: a printed warning that does not stop the run

    def problems(self, config: RunConfig) -> list[Problem]:
        """Every violation of this rule in `config`."""
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
    """Decorator that makes a rule of a function."""
    return lambda find: Rule(id=id, why=inspect.getdoc(find) or "", key=key, find=find, is_error=is_error)


def read_key(config: object, key: str) -> Any:
    """The value at a dotted key; None if a part of it is absent or the group's choice lacks the field."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def needs_gpu(*, id: str, key: str, message: str) -> Rule:
    """A rule that refuses a switch, which is off by default, on a CPU."""

    def find(config: RunConfig) -> Finding | None:
        is_on_cpu = config.hardware.generation is Generation.cpu
        return Finding(message, f"{key}=false") if is_on_cpu and read_key(config, key) else None

    return Rule(id=id, why=f"Refuse {key} on a CPU: {message}.", key=key, find=find, is_error=True)


def without(key: str, values: Iterable[str], wrong: Collection[str]) -> str:
    """The override that leaves some values out of a list."""
    return typed_list(key, [value for value in values if value not in wrong])


def another_model(config: RunConfig) -> str:
    """The override for another model, with a placeholder that the user must fill in."""
    return "model.path=FOLDER" if config.model.path else "model.name=ORG/NAME"
