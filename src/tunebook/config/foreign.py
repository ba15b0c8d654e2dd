"""What other tools call things, and what to type here instead.

The names are in `foreign.yaml`. An unknown key, choice, command or option is looked up there before a similar spelling
is suggested. Every answer follows the name in a sentence, and is empty for a name that is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import yaml

from tunebook.config.override_text import shell_word


@functools.cache
def names() -> dict[str, dict[str, str]]:
    """What to type by other tools' names, in the sections `settings`, `commands` and `options`."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    sections: dict[str, dict[str, str]] = yaml.safe_load(text)
    return sections


def instead_of(name: str, value: str | None = None) -> str:
    """What to type instead of a setting, `lora_r` also as `training.lora_r`, or of a choice, as `packing=true`."""
    settings, parts = names()["settings"], name.lower().split(".")
    for suffix in (".".join(parts[start:]) for start in range(len(parts))):
        if found := settings.get(f"{suffix}={value}".lower()) or settings.get(suffix):
            return _said(found, value=value)
    return ""


def instead_of_command(name: str, words: Iterable[str]) -> str:
    """What to type instead of a command and the words that follow it."""
    return _said(names()["commands"].get(name, ""), more=words)


def instead_of_option(option: str, value: str) -> str:
    """What to type instead of an option; also of a setting that is typed as one."""
    if found := names()["options"].get(option):
        return _said(found, value=value)
    return instead_of(option.lstrip("-").replace("-", "_"), value)


def _said(found: str, *, value: str | None = None, more: Iterable[str] = ()) -> str:
    if not found or found.startswith("("):
        return found and f" {found}"
    words, has_remark, remark = found.partition(" (")
    filled = [word.replace("{value}", (value or "VALUE").strip("[]")) for word in words.split(" ")]
    return f"; type {' '.join(map(shell_word, [*filled, *more]))}{has_remark}{remark}"
