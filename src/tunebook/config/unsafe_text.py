"""Control characters and secrets in texts: found, escaped or refused.

A control character must reach no script, header, variable or command line. A line break ends a comment or an option of
a job script, and what follows is a command; an escape moves a terminal's cursor. Some programs, such as Python's
`splitlines`, also treat Unicode separators as line breaks. A secret of the environment, recognized by the name of its
variable or by its form, must not be in any file that a run writes.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from tunebook.errors import RequestError

_NAMES = {
    "\n": "a line break", "\r": "a carriage return", "\t": "a tab", "\0": "a NUL", "\x1b": "an escape",
    "\x85": "a line break (NEL)", "\u2028": "a line separator", "\u2029": "a paragraph separator",
}  # fmt: skip
# Unicode categories: control characters, separators of lines and paragraphs, surrogates for bytes that are not text.
_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they change the displayed order
# TOKENIZERS_PARALLELISM is not a secret, and HF_TOKEN_PATH is a file.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:\w*(?:KEY|TOKEN)|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)(?:_\d+)?$|(?:^|_)SECRET_",
    re.IGNORECASE,
)
# Formats of access tokens: Hugging Face, OpenAI and similar, GitHub, Slack, AWS.
_SECRET_TEXT = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-(?:proj-|ant-|svcacct-)?[A-Za-z0-9_]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"
    r"|\bxox[abp]-[A-Za-z0-9-]{20,}|\bAKIA[0-9A-Z]{16}\b"
)
_SHORTEST = 16  # characters: a shorter value may be an ordinary word
_HIDDEN = "***"


def control_character(text: str) -> str | None:
    """The name of the first control character of a text; None if there is none."""
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


def is_secret_name(variable: str) -> bool:
    """True if a variable's name means that its value is secret."""
    return _SECRET_NAME.search(variable) is not None


def secret_in(text: str, secrets: Mapping[str, str]) -> str | None:
    """A description of the secret in a text; None if it contains none of `known_secrets` and no access token."""
    for name, value in secrets.items():
        if value in text:
            return f"the value of {name}"
    return "what looks like an access token" if _SECRET_TEXT.search(text) else None


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with *** for every known secret."""
    for value in known_secrets(os.environ if environment is None else environment).values():
        text = text.replace(value, _HIDDEN)
    return _SECRET_TEXT.sub(_HIDDEN, text)


def known_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with a secret: long enough not to be a word, and not a path or a sentence."""
    return {
        name: value
        for name, value in environment.items()
        if len(value) >= _SHORTEST and is_secret_name(name) and not re.search(r"\s|^[/~.]", value)
    }
