"""The hash of a run's configuration: equal for the same run, wherever it runs and writes.

It covers every setting that differs from the schema's default, so a key that is added to the schema later changes no
hash until it is set. Fields that do not change the result are marked in their metadata.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from tunebook.config.book import BOOK_PREFIX, book_root
from tunebook.config.schema import RunConfig, describes_claim, is_identity
from tunebook.config.walk import schemas_of, texts_of
from tunebook.files import sha256_text

# Detected memory sizes. No loss depends on them; the settings that are derived from them are hashed themselves.
CAPACITIES = ("hardware.memory_gib", "hardware.host_memory_gib")

_Choice = Callable[["dataclasses.Field[Any]"], bool]

ABSENT = "absent"  # the value of a key that a schema does not have


def config_hash(config: RunConfig, book_folder: str | None = None) -> str:
    """SHA-256 of the settings that differ from their defaults: sorted keys, the book's paths as `book:...`."""
    changed = _changed(config, book_folder or _book_folder())
    text = json.dumps(changed, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return sha256_text(text)


def hash_anywhere(config: RunConfig, asked: Collection[str]) -> str:
    """`config_hash` without detected memory: equal for one request on hosts with different memory."""
    changed = dataclasses.replace(config.hardware)
    for key in found_capacities(config, asked):
        setattr(changed, key.removeprefix("hardware."), None)
    return config_hash(dataclasses.replace(config, hardware=changed))


def found_capacities(config: RunConfig, asked: Collection[str]) -> tuple[str, ...]:
    """The CAPACITIES that were detected; `asked` are the keys that the user has set."""
    named = {*asked, *(["hardware.host_memory_gib"] if config.hardware.host_memory_gib is not None else [])}
    return tuple(key for key in CAPACITIES if key not in named)


def has_hash(config: RunConfig, expected: str) -> bool:
    """True if a configuration has this hash, also if the book was in another folder then."""
    if expected == config_hash(config):
        return True
    paths = [Path(text) for _, texts, _ in texts_of(config) for text in texts if text.startswith("/")]
    folders = {folder for path in paths for folder in path.parents}
    return any(config_hash(config, f"{folder}/") == expected for folder in folders)


def result_settings(config: RunConfig) -> dict[str, Any]:
    """Every setting that changes the result, as plain JSON values by section."""
    return dict(_sections(config, is_identity, _book_folder()))


def comparable_config(config: RunConfig) -> dict[str, Any]:
    """The settings that two runs of one claim share: all that change losses, speed or memory, except the machine."""
    kept = dict(_sections(config, describes_claim, _book_folder()))
    del kept["hardware"]
    return kept


def default_of(key: str) -> Any:
    """The default of a dotted key as a plain value, which older records have implicitly; ABSENT if unknown."""
    section, _, name = key.rpartition(".")
    for schema in schemas_of(section):
        for field in dataclasses.fields(schema):
            if field.name == name:
                return _plain(_default(field), describes_claim, _book_folder())
    return ABSENT


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
    keys = sorted(first.keys() | second.keys())
    filled = {key[:end] for key in keys for end, letter in enumerate(key) if letter == "."}
    pairs = ((key, *(side[key] if key in side else absent(key) for side in (first, second))) for key in keys)
    return [
        (key, mine, yours)
        for key, mine, yours in pairs
        if mine != yours and not (key in filled and {} in (mine, yours))
    ]


def changed_settings(recorded: dict[str, Any], own: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """`flat_differences` of two configurations: a key that only one of them has is at its default in the other."""
    return flat_differences(recorded, own, absent=default_of)


def _changed(node: Any, book_folder: str) -> dict[str, Any]:
    """The fields of a dataclass that belong to a run's identity and differ from their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        value, default = getattr(node, field.name), _default(field)
        if not is_identity(field) or value == default:
            continue
        if dataclasses.is_dataclass(value):
            nested = _changed(value, book_folder)
            if nested or not dataclasses.is_dataclass(default):
                found[field.name] = nested
        elif isinstance(value, dict):
            found[field.name] = {
                name: _changed(part, book_folder)
                if dataclasses.is_dataclass(part)
                else _plain(part, is_identity, book_folder)
                for name, part in value.items()
            }
        else:
            found[field.name] = _plain(value, is_identity, book_folder)
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _sections(node: Any, is_kept: _Choice, book_folder: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(node):
        if is_kept(field):
            yield field.name, _plain(getattr(node, field.name), is_kept, book_folder)


def _plain(value: Any, is_kept: _Choice, book_folder: str) -> Any:
    if dataclasses.is_dataclass(value):
        return dict(_sections(value, is_kept, book_folder))
    if isinstance(value, dict):
        return {key: _plain(item, is_kept, book_folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, is_kept, book_folder) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str) and value.startswith(book_folder):
        return BOOK_PREFIX + value.removeprefix(book_folder)
    return value


def _book_folder() -> str:
    return f"{book_root()}/"
