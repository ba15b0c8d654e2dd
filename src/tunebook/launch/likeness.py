"""Whether an earlier run is the one that is asked for now, and what to type where it nearly is.

Two runs are the same where their configurations' hashes are, whatever memory was found on the machine. One that differs
in what `auto` decided, or in the machine, is another run: there are words that go on with it all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from tunebook.checkpoint.candidates import named_by
from tunebook.checkpoint.identity import differences
from tunebook.checkpoint.newest import newest_checkpoint
from tunebook.checkpoint.record import Identity, read_record
from tunebook.config.choices import ResumeAnyway
from tunebook.config.frozen import load_config
from tunebook.config.identity import CAPACITIES, config_hash, found_capacities, result_settings
from tunebook.config.override_text import as_typed, typed
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import RequestError
from tunebook.record.run_folder import RUN_FILE

# What `auto` decides by estimates that get better: how much a pass computes and what it keeps. No loss depends on it.
_DECIDED_ANEW = ("activation.checkpointing", "packing.row_length", "training.micro_batch_size")
_MACHINE = ("hardware.generation", "hardware.num_nodes", "hardware.gpus_per_node")


def is_same_run(config: RunConfig, folder: Path, sha256: str, asked: Collection[str]) -> bool:
    """Whether the run in a folder, whose configuration had the hash, is that of `config`, as it was resolved here.

    `asked` are the keys that somebody has set.
    """
    if sha256 == config_hash(config):
        return True
    theirs = _frozen(folder)
    return theirs is not None and config_hash(_taken_over(config, theirs, found_capacities(config, asked))) == sha256


def began_alike(config: RunConfig, folder: Path) -> bool:
    """Whether the run in a folder began where `training.resume` says: elsewhere, its losses are others."""
    named = named_by(config)
    if named is None:
        return True
    theirs = _frozen(folder)
    begun = named_by(theirs) if theirs is not None else None
    if theirs is None or begun is None or begun.resolve() != named.resolve():
        return False
    # `best` is about checkpoints that are gone now, and not about where a run began.
    return not (set(theirs.training.resume_anyway) ^ set(config.training.resume_anyway)) - {ResumeAnyway.best}


def decided_otherwise(config: RunConfig, folder: Path, sha256: str, asked: Collection[str]) -> list[str]:
    """What to type for an earlier run's configuration, where nothing but `_DECIDED_ANEW` differs; else nothing."""
    theirs = _frozen(folder)
    if theirs is None:
        return []
    same = _taken_over(config, theirs, (*found_capacities(config, asked), *_DECIDED_ANEW))
    if config_hash(same) != sha256:
        return []
    return [f"{key}={as_typed(_plain(theirs, key))}" for key in _changed(theirs, config, _DECIDED_ANEW)]


def on_another_machine(config: RunConfig, folder: Path, sha256: str, asked: Collection[str]) -> str | None:
    """How an earlier run's machine differs and what goes on from its checkpoint; None where more differs, or less.

    The strategy may differ with the machine, and what `auto` decides by it.
    """
    theirs, checkpoint = _frozen(folder), newest_checkpoint(folder)
    if theirs is None or checkpoint is None:
        return None
    named = [key for key in CAPACITIES if key not in found_capacities(config, asked)]
    changed = _changed(theirs, config, (*_MACHINE, *named))
    own = _taken_over(config, theirs, (*_MACHINE, *CAPACITIES, "parallelism", *_DECIDED_ANEW))
    if not changed or config_hash(own) != sha256:
        return None
    changed += _changed(theirs, config, ("parallelism.strategy",))
    told = [f"{key} was {as_typed(_plain(theirs, key))} and is {as_typed(_plain(config, key))}" for key in changed]
    return f"{', '.join(told)}; {_going_on(config, folder, read_record(checkpoint).identity)}"


def _going_on(config: RunConfig, folder: Path, theirs: Identity) -> str:
    """What to type to go on from a checkpoint whose run differs in its machine, or why that cannot be."""
    # Of the data and the model no more is known here than that the configurations name the same.
    strategy = config.parallelism.strategy.name
    own = replace(theirs, strategy=strategy, world_size=world_size(config), settings=result_settings(config))
    found = list(differences(theirs, own))
    impossible = next((difference for difference in found if difference.allowed_by is None), None)
    if impossible is not None:
        return f"{impossible.text}. {impossible.fix}"
    needed = {*(difference.allowed_by for difference in found), *config.training.resume_anyway}
    names = ",".join(name.name for name in ResumeAnyway if name in needed)
    anyway = f" 'training.resume_anyway=[{names}]'" if names else ""
    return f"to go on: {typed('training.resume', str(folder))}{anyway}"


def _frozen(folder: Path) -> RunConfig | None:
    try:
        return load_config(folder / RUN_FILE)
    except RequestError:
        return None


def _taken_over(config: RunConfig, theirs: RunConfig, keys: Collection[str]) -> RunConfig:
    """A copy of a configuration with another one's values of some keys."""
    own = copy.deepcopy(config)
    for key in keys:
        *sections, name = key.split(".")
        setattr(_value(own, sections), name, _value(theirs, [*sections, name]))
    return own


def _changed(theirs: RunConfig, config: RunConfig, keys: Collection[str]) -> list[str]:
    return [key for key in keys if _plain(theirs, key) != _plain(config, key)]


def _plain(config: RunConfig, key: str) -> object:
    value = _value(config, key.split("."))
    return value.name if isinstance(value, Enum) else value


def _value(config: RunConfig, path: list[str]) -> Any:
    node: Any = config
    for name in path:
        node = getattr(node, name)
    return node
