"""What other tools call settings, and what to type here instead.

The names are in `foreign.yaml`. An unknown key or choice is looked up there before a similar spelling is suggested.
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import yaml


@functools.cache
def names() -> dict[str, str]:
    """What to type by other tools' names."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    settings: dict[str, str] = yaml.safe_load(text)
    return settings


def instead_of(name: str, value: str | None = None) -> str:
    """What to type instead of a setting, `lora_r` also as `training.lora_r`, or of a choice, as `packing=true`.

    It follows the name in a sentence, and is empty for a name that is not known.
    """
    parts = name.lower().split(".")
    for suffix in (".".join(parts[start:]) for start in range(len(parts))):
        if entry := names().get(f"{suffix}={value}".lower()) or names().get(suffix):
            overrides, has_remark, remark = entry.partition("(")
            typed = overrides.split()
            words = [shlex.quote(word.replace("{value}", (value or "VALUE").strip("[]"))) for word in typed]
            return f"{'; type ' if words else ''}{' '.join(words)} {has_remark}{remark}".rstrip()
    return ""
