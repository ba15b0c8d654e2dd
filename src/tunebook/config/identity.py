"""The hash of a run's configuration: equal for the same run, wherever it runs and writes.

It covers every setting that differs from the schema's default, so a key that is added to the schema later changes no
hash until it is set. Fields that do not change the result are marked in their metadata.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from tunebook.config.book import recipe_name
from tunebook.config.keys import ABSENT, PART, Setting, all_keys, settings_of
from tunebook.config.schema import RunConfig
from tunebook.files import sha256_text


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the settings that change the result and differ from their defaults."""
    changed = {key: value for key, value in flat(result_settings(config)) if value != default_of(key)}
    return sha256_text(json.dumps(changed, sort_keys=True, ensure_ascii=False, allow_nan=False))


def result_settings(config: RunConfig) -> dict[str, Any]:
    """Every setting that changes the result, as plain JSON values by section."""
    settings: dict[str, Any] = plain(config, _changes_result)
    return settings


def comparable_config(config: RunConfig) -> dict[str, Any]:
    """The settings that two runs of one claim share: all that change losses, speed or memory, except the machine."""
    kept: dict[str, Any] = plain(
        config, lambda setting: _changes_result(setting) or bool(setting.metadata.get("evidence"))
    )
    del kept["hardware"]
    kept["recipe"] = None if config.recipe is None else recipe_name(config.recipe)  # it may be typed as a file
    return kept


def _changes_result(setting: Setting) -> bool:
    return bool(setting.metadata.get("identity", True))


def plain(value: Any, is_kept: Callable[[Setting], bool] = lambda setting: True) -> Any:
    """A configuration, or a part of it, as JSON values: dataclasses are dictionaries, choices are their names."""
    if dataclasses.is_dataclass(value):
        kept = filter(is_kept, settings_of(value))
        return {setting.name: plain(getattr(value, setting.name), is_kept) for setting in kept}
    if isinstance(value, dict):
        return {key: plain(item, is_kept) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, is_kept) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, str) else value  # a path without the folder where it was typed


def default_of(key: str) -> Any:
    """The default of a dotted key as a plain value; ABSENT if the schema does not have it."""
    setting = all_keys().get(re.sub(r"^dataset\.parts\.[^.]+", f"dataset.parts.{PART}", key))
    if setting is None:
        return ABSENT
    return plain(setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory())


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested sections with its dotted key. An empty section counts as a value."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def flat_differences(
    one: Any, other: Any, path: str = "", absent: Callable[[str], Any] = lambda key: None
) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both; `absent` gives the value of a key that only one of them has.

    A section that is empty in one of them is not listed in addition to the keys of the other.
    """
    first, second = dict(flat(one, path)), dict(flat(other, path))
    every = sorted(first.keys() | second.keys())
    filled = {key[:end] for key in every for end, letter in enumerate(key) if letter == "."}
    pairs = ((key, *(side[key] if key in side else absent(key) for side in (first, second))) for key in every)
    return [
        (key, mine, yours)
        for key, mine, yours in pairs
        if mine != yours and not (key in filled and {} in (mine, yours))
    ]


def changed_settings(recorded: dict[str, Any], own: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """`flat_differences` of two configurations: a key that only one of them has is at its default in the other."""
    return flat_differences(recorded, own, absent=default_of)
