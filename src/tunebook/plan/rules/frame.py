"""The form of a rule: an id, a fix, and a function that finds violations in a resolved configuration.

A rule is a function under `@rule(id, key, fix)`. Its docstring says what it refuses and why (`tunebook explain ID`). It
must handle any configuration with numbers in their ranges, since all other problems are reported at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tunebook.config.schema import RunConfig
from tunebook.errors import Problem


@dataclass(frozen=True)
class Finding:
    """One violation of a rule that has several keys or fixes."""

    message: str  # what is wrong
    key: str = ""  # empty: the rule's
    fix: str = ""  # what to type instead; empty: the rule's


Find = Callable[[RunConfig], Iterable[str | Finding]]  # a message alone: with the rule's key and fix


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cross-field rule."""

    id: str
    why: str  # what it refuses and why, for `tunebook explain`
    key: str  # empty: each finding names one
    fix: str  # empty: each finding has one
    find: Find
    is_error: bool  # False: a printed warning that does not stop the run

    def problems(self, config: RunConfig) -> list[Problem]:
        """Every violation of this rule in `config`."""
        found = [Finding(each) if isinstance(each, str) else each for each in self.find(config)]
        return [
            Problem(
                id=self.id,
                key=each.key or self.key,
                message=each.message,
                fix=each.fix or self.fix,
                is_error=self.is_error,
            )
            for each in found
        ]


def rule(id: str, key: str = "", fix: str = "", *, is_error: bool = True) -> Callable[[Find], Rule]:
    """Decorator that makes a rule of a function."""
    return lambda find: Rule(id=id, why=inspect.getdoc(find) or "", key=key, fix=fix, find=find, is_error=is_error)
