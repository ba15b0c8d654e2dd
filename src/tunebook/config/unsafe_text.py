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


def shown(text: str, kept: str = "") -> str:
    r"""The text for a terminal: control characters, other than those kept, as \n, \x1b or \u2028."""
    return "".join(ascii(sign)[1:-1] if _is_control(sign) and sign not in kept else sign for sign in text)


def printable(text: str) -> str:
    """Text of data, of a model or of a program for a terminal: as `shown`, but line breaks and tabs stay."""
    return shown(text, kept="\n\t")


def _is_control(sign: str) -> bool:
    return unicodedata.category(sign) in _CATEGORIES or sign in _DIRECTIONS


def require_printable(key: str, text: str | Path) -> None:
    """Refuse a text with a control character in it; `key` is its key or option. Raises: RequestError."""
    if shown(str(text)) != str(text):
        raise RequestError(
            f"{key}={shown(str(text))} holds a control character, which could start another command in a script; type "
            "it without that character",
            problem_id="control-characters",
        )


def is_secret_name(variable: str) -> bool:
    """True if a variable's name means that its value is secret."""
    return _SECRET_NAME.search(variable) is not None


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with *** for every access token, and for the values of variables that are secret by their names.

    A value that is short enough to be a word, or a path or a sentence, is none.
    """
    for name, value in environment.items():
        if len(value) >= _SHORTEST and is_secret_name(name) and not re.search(r"\s|^[/~.]", value):
            text = text.replace(value, _HIDDEN)
    return _SECRET_TEXT.sub(_HIDDEN, text)
