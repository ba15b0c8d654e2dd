"""The hash that says two runs were asked the same thing, wherever they ran and wherever they wrote."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from tunebook.config.book import BOOK_PREFIX, book_root
from tunebook.config.schema import RunConfig
from tunebook.record.atomic_files import sha256_text

# What may differ between two runs that train the same thing: where results go and how the run is started or watched.
NOT_HASHED = (
    "outputs",
    "launcher",
    "tracking",
    "training.resume",
    "training.resume_anyway",
    "training.save_in_background",
    "training.push_to_hub",
    "dataset.num_workers",
    "model.facts.measured.linear_parameters",  # all of them counted of an architecture that is hashed
    "model.facts.measured.active_parameters",
    "model.facts.measured.largest_parameter",
    "model.facts.measured.unreached_parameters",
    "model.facts.measured.adapters",
    "model.facts.measured.expert_adapters",
    "model.facts.measured.saved_beside_experts",
    "model.facts.measured.saved_without_autocast",
)

# Nor what changes how a loss is computed and not which: a run goes on where an update, or another GPU, has decided it
# otherwise. Evidence keeps it, since speed and memory differ.
SAME_LOSS = ("model.one_pass_head",)

# How much memory there is: found on the machine, and no loss depends on it. What is decided by it is hashed itself.
CAPACITIES = ("hardware.memory_gib", "hardware.host_memory_gib")

# Settings that came after evidence and checkpoints had been recorded, with what was the only way before: left out at
# that value, so that what was recorded without them still holds.
ADDED_LATER = {
    "model.compile_layers": False,
    "model.one_pass_head": False,
    "precision.fp8_scaling": "tensorwise",
    "model.facts.measured.unreached": [],
    "model.template_date": "2024-07-26",
    "dataset.ignore_keys": [],
    "dataset.parts.*.ignore_keys": [],
    "dataset.special_tokens_in_content": "auto",
}


def config_hash(config: RunConfig) -> str:
    """SHA-256 of a resolved configuration in canonical form: sorted keys, book paths as `book:...`, see NOT_HASHED."""
    return _hash(hashed_settings(config))


def found_capacities(config: RunConfig, asked: Collection[str]) -> tuple[str, ...]:
    """Those of CAPACITIES that nobody has named; `asked` are the keys that somebody has."""
    named = {*asked, *(["hardware.host_memory_gib"] if config.hardware.host_memory_gib is not None else [])}
    return tuple(key for key in CAPACITIES if key not in named)


def hash_anywhere(config: RunConfig, asked: Collection[str]) -> str:
    """`config_hash` without what was found on the machine: the same of one request on hosts with other memory."""
    return _hash(_without(config, (*NOT_HASHED, *SAME_LOSS, *found_capacities(config, asked))))


def has_hash(config: RunConfig, expected: str) -> bool:
    """Whether a configuration has this hash, or had it while the book lay in the folder that one of its paths is in."""
    if expected in (config_hash(config), _hash(_without(config, NOT_HASHED))):  # for a while SAME_LOSS was hashed
        return True
    paths = (Path(text) for text in _texts(dataclasses.asdict(config)) if text.startswith("/"))
    folders = {folder for path in paths for folder in path.parents}
    keys = (*NOT_HASHED, *SAME_LOSS)
    return any(_hash(_without(config, keys, book_folder=str(folder))) == expected for folder in folders)


def _hash(settings: dict[str, Any]) -> str:
    return sha256_text(json.dumps(settings, sort_keys=True, ensure_ascii=False, allow_nan=False))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def hashed_settings(config: RunConfig) -> dict[str, Any]:
    """What of a configuration is hashed, as plain JSON values by section."""
    return _without(config, (*NOT_HASHED, *SAME_LOSS))


def comparable_config(config: RunConfig) -> dict[str, Any]:
    """What is hashed and SAME_LOSS, less its title and its machine: what two runs of one claim have in common."""
    return _without(config, (*NOT_HASHED, "title", "hardware"))


def _without(config: RunConfig, keys: tuple[str, ...], book_folder: str | None = None) -> dict[str, Any]:
    canonical: dict[str, Any] = _canonical(dataclasses.asdict(config), f"{book_folder or book_root()}/")
    for key in keys:
        for node, name in _places(canonical, key):
            node.pop(name, None)
    for key, before in ADDED_LATER.items():
        for node, name in _places(canonical, key):
            if name in node and node[name] == before:
                del node[name]
    return canonical


def _places(canonical: dict[str, Any], key: str) -> list[tuple[dict[str, Any], str]]:
    """The sections that hold a key, and the key's name in each; `*` stands for every section there is."""
    *sections, name = key.split(".")
    nodes = [canonical]
    for section in sections:
        found = [list(node.values()) if section == "*" else [node.get(section)] for node in nodes]
        nodes = [node for each in found for node in each if node]
    return [(node, name) for node in nodes]


def _canonical(value: Any, book_folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(item, book_folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item, book_folder) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str) and value.startswith(book_folder):
        return BOOK_PREFIX + value.removeprefix(book_folder)
    return value
