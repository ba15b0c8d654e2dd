"""Record of what Tunebook decided for the user and why, and of what the user decided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tunebook.config.schema import RunConfig

ChoiceValue = str | int | float | bool | None
AS_ASKED = "as asked"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One resolved setting: its key, its value as a user would type it, and a one-sentence reason."""

    key: str
    value: ChoiceValue
    why: str


def is_open(value: Any) -> bool:
    """Whether a value is left to `auto`."""
    return value is None or (isinstance(value, Enum) and value.name == "auto")


class Decisions:
    """A copy of a configuration that is filled in key by key, with reasons. The original is unchanged."""

    def __init__(self, config: RunConfig) -> None:
        self.config = copy.deepcopy(config)
        self.choices: list[Choice] = []

    def decide(self, key: str, answer: Callable[[], tuple[Any, str]]) -> None:
        """Keep the user's value at `key`; if it is `auto` or null, ask `answer` for a value and its reason.

        An answer of None leaves the key open; the reason names what decides it later.
        """
        *path, name = key.split(".")
        group: Any = self.config
        for part in path:
            group = getattr(group, part)
        value = getattr(group, name)
        why = AS_ASKED
        if is_open(value):
            value, why = answer()
            setattr(group, name, value)
        self.choices.append(Choice(key=key, value=value.name if isinstance(value, Enum) else value, why=why))
