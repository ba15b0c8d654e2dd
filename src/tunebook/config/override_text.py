"""Overrides as text that can be typed: quoted for Hydra's grammar, then for the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")  # needs no quotes in Hydra or a shell


def as_typed(value: object) -> str:
    """A value of a configuration as it is typed after `key=`, without quotes; None is null."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def override(key: str, value: str) -> str:
    """`key=value` for a text value."""
    return f"{key}={value if _PLAIN.fullmatch(value) else quoted(value)}"


def typed(key: str, value: str) -> str:
    """`key=value` for a text value, as one argument of a shell command."""
    return shlex.quote(override(key, value))


def shell_command(words: Iterable[str]) -> str:
    """A command that can be pasted into a shell."""
    return shlex.join(words)


def command_words(
    command: str, recipe: str | None, overrides: Iterable[str], recipes_dirs: Iterable[Path] = ()
) -> list[str]:
    """A command on a recipe, as the words that are typed."""
    dirs = [part for folder in recipes_dirs for part in ("--recipes-dir", str(folder))]
    return ["tunebook", command, *([recipe] if recipe is not None else []), *overrides, *dirs]


def quoted(value: str) -> str:
    """A text in quotes for Hydra, which treats backslashes specially only before a quote and at the end."""
    mark = "'" if '"' in value else '"'
    doubled = re.sub(rf"(\\+)(?={mark}|$)", r"\1\1", value)
    return mark + doubled.replace(mark, f"\\{mark}") + mark
