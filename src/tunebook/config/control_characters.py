"""Control characters in texts, which must reach no script, header, variable or command line: found, shown, refused.

A line break ends a comment or an option of a job script, and what follows is a command. An escape moves a terminal's
cursor. Some programs also take Unicode's separators for line breaks, Python's `splitlines` among them.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

from tunebook.errors import RequestError

_NAMES = {
    "\n": "a line break", "\r": "a carriage return", "\t": "a tab", "\0": "a NUL", "\x1b": "an escape",
    "\x85": "a line break (NEL)", "\u2028": "a line separator", "\u2029": "a paragraph separator",
}  # fmt: skip
# By Unicode: control characters, separators of lines and paragraphs, and what stands for bytes that are no text.
_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they show a text in another order than it has


def control_character(text: str) -> str | None:
    """The first control character of a text, in words; None where there is none."""
    found = next((sign for sign in text if _is_control(sign)), None)
    if found is None:
        return None
    return f"{_NAMES.get(found, 'a control character')} (U+{ord(found):04X})"


def _is_control(sign: str) -> bool:
    return unicodedata.category(sign) in _CATEGORIES or sign in _DIRECTIONS


def require_printable(what: str, text: str | Path) -> None:
    """Refuse a text with a control character in it; `what` is its key or option. Raises: RequestError."""
    found = control_character(str(text))
    if found is not None:
        raise RequestError(
            f"{what}={shown(str(text))} holds {found}, which could begin another line of a script, and a command with "
            f"it; type it without: {without_control_characters(str(text))!r}",
            problem_id="control-characters",
        )


def without_control_characters(text: str) -> str:
    """The text without control characters."""
    return "".join(sign for sign in text if not _is_control(sign))


def shown(text: str) -> str:
    r"""The text for a terminal: control characters as \n, \x1b or \u2028."""
    return "".join(ascii(sign)[1:-1] if _is_control(sign) else sign for sign in text)
