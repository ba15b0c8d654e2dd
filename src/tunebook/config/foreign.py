"""What other tools call settings, and what to type here instead.

The names are in `foreign.yaml`. An unknown key or choice is looked up there before a similar spelling is suggested.
"""

from __future__ import annotations

import functools
import re
import shlex
from enum import Enum
from pathlib import Path

import yaml

from tunebook.config.keys import all_keys
from tunebook.config.ranges import demand
from tunebook.config.schema import GROUPS

_EXAMPLE = re.compile(r"\{(.*)\}")


@functools.cache
def names() -> dict[str, str]:
    """What to type by other tools' names."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    settings: dict[str, str] = yaml.safe_load(text)
    return settings


def instead_of(name: str, value: str | None = None, *, missing: str = "") -> str:
    """What to type instead of a setting, `lora_r` also as `training.lora_r`, or of a choice, as `packing=true`.

    A sentence such as `lora_r is peft.rank: type peft=lora peft.rank=16`; empty for a name that is not known. `missing`
    replaces its beginning.
    """
    parts = name.lower().split(".")
    suffixes = [".".join(parts[start:]) for start in range(len(parts))]
    found = (each for suffix in suffixes for each in (f"{suffix}={value}".lower(), suffix) if each in names())
    known = next(found, "")
    entry = names().get(known)
    if entry is None or (name in all_keys() and name not in GROUPS):
        return ""
    overrides, has_remark, remark = entry.partition("(")
    typed = [_with_value(override, value) for override in overrides.split()]
    unknown = missing or (f"there is no {name}={value}" if name in GROUPS else f"there is no key {name!r}")
    if not typed:
        return f"{unknown}: {remark.removesuffix(')')}"
    key = next((override.partition("=")[0] for override in overrides.split() if _EXAMPLE.search(override)), None)
    is_refused = key is not None and value and not _is_taken(key, value)
    own = f"{name} is {key}{f', which cannot be {value}' if is_refused else ''}"
    beginning = unknown if missing or key is None else own
    if key is None and "=" not in known and value is not None and value.lower() in ("false", "null", "none"):
        return f"{beginning}: leave it out"
    return f"{beginning}: type {' '.join(typed)} {has_remark}{remark}".rstrip()


def _with_value(override: str, value: str | None) -> str:
    """An override with the typed value in place of its example, where its key takes that value."""
    key, _, example = override.partition("=")
    is_taken = value and _is_taken(key, value) and _EXAMPLE.search(example)
    return shlex.quote(_EXAMPLE.sub(lambda match: value.strip("[]") if is_taken and value else match[1], override))


def _is_taken(key: str, value: str) -> bool:
    setting = all_keys().get(key)
    if value.startswith("[{"):  # axolotl's list of data sets, each with settings
        return False
    if value == "null" and setting is not None:
        return "None" in str(setting.type)
    if setting is not None and isinstance(setting.default, Enum):
        return value.strip("[]") in type(setting.default).__members__
    if setting is None or "limits" not in setting.metadata:
        return True
    try:
        return demand(setting, int(value) if str(setting.type).startswith("int") else float(value)) is None
    except ValueError:
        return False
