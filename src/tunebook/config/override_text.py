"""An override as text that works when it is typed: quoted for Hydra's grammar, and then for the shell."""

from __future__ import annotations

import re
import shlex

_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")  # what both Hydra and a shell take as it is


def as_typed(value: object) -> str:
    """A value of a configuration as it is typed after `key=`, unquoted: null, true and false are Hydra's words."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(key: str, value: str) -> str:
    """`key=value` for a text value, as one word of a shell's command line."""
    return f"{key}={value}" if _PLAIN.fullmatch(value) else shlex.quote(f"{key}={quoted(value)}")


def quoted(value: str) -> str:
    """A text between quotes as Hydra reads it: backslashes only count before a quote, and at the end."""
    mark = "'" if '"' in value else '"'
    doubled = re.sub(rf"(\\+)(?={mark}|$)", r"\1\1", value)
    return mark + doubled.replace(mark, f"\\{mark}") + mark
