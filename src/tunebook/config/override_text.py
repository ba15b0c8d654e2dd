"""Overrides as text that can be typed: quoted for Hydra's grammar, then for the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from tunebook.config.unsafe_text import control_character, shown

_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")  # needs no quotes in Hydra or a shell
_OPENING, _CLOSING, _QUOTES = "[{(", ")}]", "'\""


def as_typed(value: object) -> str:
    """A value of a configuration as it is typed after `key=`, without quotes; None is null."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(key: str, value: str) -> str:
    """`key=value` for a text value, as one argument of a shell command."""
    return f"{key}={value}" if _PLAIN.fullmatch(value) else shell_word(f"{key}={quoted(value)}")


def shell_word(text: str) -> str:
    """A text as one argument of a shell command, on one line: bash and zsh read `$'...'` with a line break as \\n."""
    if control_character(text) is None:
        return shlex.quote(text)
    return "$'" + shown(re.sub(r"[\\']", r"\\\g<0>", text)) + "'"


def shell_command(words: Iterable[str]) -> str:
    """A command as one line that can be pasted into a shell."""
    return " ".join(map(shell_word, words))


def command_words(
    command: str, recipe: str | None, overrides: Iterable[str], recipes_dirs: Iterable[Path] = ()
) -> list[str]:
    """A command on a recipe, as the words that are typed."""
    dirs = [part for folder in recipes_dirs for part in ("--recipes-dir", str(folder))]
    return ["tunebook", command, *([recipe] if recipe is not None else []), *overrides, *dirs]


def split_values(listed: str) -> list[str]:
    """Split at the commas between values, but not at those inside brackets or quotes."""
    values, depth, quote = [""], 0, ""
    for place, letter in enumerate(listed):
        if quote:
            quote = "" if letter == quote and listed[place - 1] != "\\" else quote
        elif letter in _QUOTES:
            quote = letter
        else:
            depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def quoted(value: str) -> str:
    """A text in quotes for Hydra, which treats backslashes specially only before a quote and at the end."""
    mark = "'" if '"' in value else '"'
    doubled = re.sub(rf"(\\+)(?={mark}|$)", r"\1\1", value)
    return mark + doubled.replace(mark, f"\\{mark}") + mark
