"""The record of what was decided for the user and why, and of what the user decided."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tunebook.config.schema import RunConfig

ChoiceValue = str | int | float | bool | None
AS_ASKED = "as asked"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One resolved setting: its key, its value as a user would type it, and one sentence of why."""

    key: str
    value: ChoiceValue
    why: str


def asked_keys(choices: Iterable[Choice]) -> frozenset[str]:
    """The keys that somebody has set, on the command line or in the recipe, of those that could be left open."""
    return frozenset(choice.key for choice in choices if choice.why == AS_ASKED)


class Decisions:
    """A copy of a configuration that is filled in one key at a time, with the reasons. The original stays as it is."""

    def __init__(self, config: RunConfig) -> None:
        self.config = copy.deepcopy(config)
        self.choices: list[Choice] = []

    def decide(self, key: str, answer: Callable[[], tuple[Any, str]]) -> None:
        """Keep what the user set at `key`; ask `answer` for a value and its reason where it is `auto` or null.

        An answer of None leaves the key open: somebody else decides, and the reason says who.
        """
        *path, name = key.split(".")
        group: Any = self.config
        for part in path:
            group = getattr(group, part)
        value = getattr(group, name)
        why = AS_ASKED
        if value is None or (isinstance(value, Enum) and value.name == "auto"):
            value, why = answer()
            setattr(group, name, value)
        self.choices.append(Choice(key=key, value=value.name if isinstance(value, Enum) else value, why=why))
