"""Secrets of the environment: found by the names of variables, and kept out of every file that a run writes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# TOKENIZERS_PARALLELISM is none, and HF_TOKEN_PATH names a file.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:\w*(?:KEY|TOKEN)|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)(?:_\d+)?$|(?:^|_)SECRET_",
    re.IGNORECASE,
)
# As their makers write them: Hugging Face, OpenAI and the like, GitHub, Slack, AWS.
_SECRET_TEXT = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-(?:proj-|ant-|svcacct-)?[A-Za-z0-9_]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"
    r"|\bxox[abp]-[A-Za-z0-9-]{20,}|\bAKIA[0-9A-Z]{16}\b"
)
_SHORTEST = 16  # characters: a shorter value may be a word that stands elsewhere for itself
_HIDDEN = "***"


def is_secret_name(variable: str) -> bool:
    """Whether a variable's name says that its value is secret."""
    return _SECRET_NAME.search(variable) is not None


def secret_in(text: str, environment: Mapping[str, str] | None = None) -> str | None:
    """What secret a text holds, in words; None where it holds none that is known."""
    for name, value in _secrets(os.environ if environment is None else environment).items():
        if value in text:
            return f"the value of {name}"
    return "what looks like an access token" if _SECRET_TEXT.search(text) else None


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with *** for every secret that is known."""
    for value in _secrets(os.environ if environment is None else environment).values():
        text = text.replace(value, _HIDDEN)
    return _SECRET_TEXT.sub(_HIDDEN, text)


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold a secret: long enough not to be a word, and no path or sentence."""
    return {
        name: value
        for name, value in environment.items()
        if len(value) >= _SHORTEST and is_secret_name(name) and not re.search(r"\s|^[/~.]", value)
    }
