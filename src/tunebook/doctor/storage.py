"""Disk space for what a recipe writes and downloads, and the hub's cache and token."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunebook.config.choices import MasterWeights, PeftMethod, Weights
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.doctor.findings import Finding, Kind
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.files import cache_root
from tunebook.hardware.disk import existing, size_text
from tunebook.model.hub import unreadable_token

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def cached_bytes(name: str, revision: str | None) -> int | None:
    """The cached bytes of a hub model's weights; None if all are cached: a single file, or every shard of an index."""
    if any(_cached(name, file, revision) is not None for file in _WHOLE):
        return None
    num_bytes = 0
    for index in _INDICES:
        file = _cached(name, index, revision)
        shards = _shards(file) if file is not None else []
        found = [path for shard in shards if (path := _cached(name, shard, revision)) is not None]
        if shards and len(found) == len(shards):
            return None
        num_bytes = max(num_bytes, sum(path.stat().st_size for path in found))
    return num_bytes


def _cached(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) and Path(path).exists() else None


def _shards(index: Path) -> list[str]:
    """The files of an index; empty if it is damaged."""
    try:
        return sorted({str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


GIB = 2**30
_MIN_FREE_GIB = 5.0  # records, prepared data, compiled operators
_PUBLISHED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The first variable that is set counts, whatever its value. Source: huggingface_hub, `constants.HF_HUB_OFFLINE`.
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_OFFLINE = ("1", "on", "yes", "true")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The purpose of a folder, and the bytes that a recipe will write into it."""

    purpose: str
    folder: Path
    needed: int
    why: str = ""
    elsewhere: str = ""  # the override for another disk
    with_less: tuple[tuple[str, int], ...] = ()  # overrides that need less, with the bytes; the smallest change first


def check_storage(config: RunConfig | None, outputs: Path) -> list[Finding]:
    """Return the findings. Needs on the same disk are added up."""
    from huggingface_hub import constants

    spaces = [
        checkpoint_space(config, outputs),
        hub_space(config, Path(constants.HF_HUB_CACHE)),
        Space(purpose="prepared data and compiled operators", folder=cache_root(), needed=0),
    ]
    return [*disks(spaces), *_hub_model(config), _token(config)]


def checkpoint_space(config: RunConfig | None, outputs: Path) -> Space:
    """The run folder: the final model, the kept checkpoints and the one being written."""
    space = Space(purpose="run folders", folder=outputs, needed=0, elsewhere="outputs=FOLDER")
    facts = config.model.facts if config is not None else None
    if config is None or facts is None or config.peft.method is not PeftMethod.full:
        return space
    weight, optimizer = checkpoint_bytes(config)
    training = config.training
    kept = training.keep_checkpoints if training.save_every_steps else 0
    model, one = facts.num_parameters * weight, facts.num_parameters * (weight + optimizer)
    why = f"the model at the end ({size_text(model)})"
    if not kept:
        return replace(space, needed=model, why=why)
    is_ranked = training.load_best_at_end or training.early_stopping_patience is not None
    more, which = (2, "the best and the one in writing") if is_ranked else (1, "and the one in writing")
    which = f"training.keep_checkpoints={kept}{', ' if is_ranked else ' '}{which}"
    why += f" and {kept + more} checkpoints of {size_text(one)} ({which})"
    with_less = [("training.keep_checkpoints=1", model + (1 + more) * one)] if kept > 1 else []
    if not training.load_best_at_end:  # which is loaded from a checkpoint
        with_less.append(("training.save_every_steps=null (nothing to resume from)", model))
    return replace(space, needed=model + (kept + more) * one, why=why, with_less=tuple(with_less))


def checkpoint_bytes(config: RunConfig) -> tuple[int, int]:
    """Return a parameter's bytes in a checkpoint: of weights, and of optimizer state (at most two moments).

    DeepSpeed also writes the weights as module states, and an fp32 copy of them with the moments. Measured on the
    quickstart, without its tokenizer's 0.7 MB: 12 bytes per parameter on one rank, 20 with ZeRO-2 on two.
    """
    weight = 2 if config.precision.master_weights is MasterWeights.bf16 else 4
    state_bytes = OPTIMIZERS[config.optimizer.name].state_bytes
    moments = math.ceil(2 * weight if state_bytes is None else state_bytes)
    return weight, moments + (weight + 4 if isinstance(config.parallelism, ZeroConfig) else 0)


def hub_space(config: RunConfig | None, cache: Path) -> Space:
    """The hub's cache: the published weights that are not cached yet."""
    space = Space(
        purpose="downloaded models and data sets",
        folder=cache,
        needed=0,
        elsewhere="HF_HOME=FOLDER in front of the command",
    )
    facts = config.model.facts if config is not None else None
    there = _begun_download(config)
    if config is None or facts is None or there is None:
        return space
    needed = max(0, facts.num_parameters * _PUBLISHED_BYTES.get(facts.dtype, 4) - there)
    rest = "the rest of " if there else ""
    return replace(space, needed=needed, why=f"{rest}{config.model.name} ({size_text(needed)})")


def _begun_download(config: RunConfig | None) -> int | None:
    """The bytes in the hub's cache of weights that a run has to download; None if it downloads none."""
    model = config.model if config is not None else None
    if model is None or model.name is None or model.weights is not Weights.pretrained:
        return None
    return cached_bytes(model.name, model.revision)


def disks(spaces: list[Space]) -> Iterator[Finding]:
    """One finding per disk, and one per folder that cannot be written or created."""
    by_disk: dict[int, list[Space]] = {}
    for space in spaces:
        there = existing(space.folder)
        if not there.is_dir():
            yield Kind.storage.error(
                id="folder-not-writable",
                what=f"{there} is not a folder, and {space.purpose} go to {space.folder}",
                fix="another folder: outputs=FOLDER, TUNEBOOK_CACHE, HF_HOME",
                data={"folder": str(space.folder)},
            )
            continue  # nothing can be written there, whatever the free space
        if not os.access(there, os.W_OK | os.X_OK):
            yield Kind.storage.error(
                id="folder-not-writable",
                what=f"{there} cannot be written to, and {space.purpose} go to {space.folder}",
                fix=f"sudo chown $(id -u) {there}, or another folder: outputs=FOLDER, TUNEBOOK_CACHE, HF_HOME",
                data={"folder": str(space.folder)},
            )
        by_disk.setdefault(there.stat().st_dev, []).append(space)
    for together in by_disk.values():
        yield disk(together, shutil.disk_usage(existing(together[0].folder)).free)


def disk(spaces: list[Space], free: int) -> Finding:
    """The free bytes of one disk compared with what will be written to it."""
    needed = sum(space.needed for space in spaces)
    where = "; ".join(f"{space.folder} ({space.purpose})" for space in spaces)
    reasons = "; ".join(space.why for space in spaces if space.why)
    what = f"{size_text(free)} free for {where}" + (f"; needed: {size_text(needed)}: {reasons}" if needed else "")
    data = {
        "free_gib": round(free / GIB, 2),
        "needed_gib": round(needed / GIB, 2),
        "folders": [str(space.folder) for space in spaces],
    }
    if needed > free:
        return Kind.storage.error(id="disk-space", what=what, fix=_with_room(spaces, free), data=data)
    if free - needed < _MIN_FREE_GIB * GIB:
        return Kind.storage.warning(
            id="disk-space",
            what=f"{what}; that leaves less than {_MIN_FREE_GIB:g} GiB",
            fix=f"free some space: {_what_takes_it(spaces)}",
            data=data,
        )
    return Kind.storage.ok(id="disk-space", what=what, data=data)


def _with_room(spaces: list[Space], free: int) -> str:
    """Return the fix for a full disk: the smallest change that makes everything fit, and another disk."""
    needed = sum(space.needed for space in spaces)
    less = [(words, needed - space.needed + then) for space in spaces for words, then in space.with_less]
    moved = [f"{space.elsewhere} ({size_text(space.needed)})" for space in spaces if space.needed]
    other_disk = f"another disk: {', '.join(moved)}"
    fitting = [f"{words}, with which {size_text(then)} are needed" for words, then in less if then <= free]
    if fitting:
        return f"{fitting[0]}; or {other_disk}"
    tried = [f"{words} still needs {size_text(then)}" for words, then in less]
    return "; ".join([other_disk, *tried[-1:]])


def _what_takes_it(spaces: list[Space]) -> str:
    """The commands that show the contents of a disk (`du -x` stays on one disk)."""
    root = _mount_point(existing(spaces[0].folder))
    commands = [f"du -xhd1 {shlex.quote(str(root))} | sort -h"]
    if root == Path("/"):
        commands.append("docker system df")
    if any("HF_HOME" in space.elsewhere for space in spaces):
        commands.append("hf cache ls")
    return ", ".join(commands)


def _mount_point(folder: Path) -> Path:
    """The mount point of a folder's disk."""
    real = folder.resolve()
    return next(path for path in (real, *real.parents) if path.is_mount())


def _hub_model(config: RunConfig | None) -> Iterator[Finding]:
    """Report a model that must be downloaded, on a machine that may be configured to stay offline."""
    if config is None or _begun_download(config) is None:
        return
    name, revision = config.model.name, config.model.revision
    at = f" --revision {revision}" if revision else ""
    variable = _first_set(_OFFLINE_VARIABLES)
    if variable is not None and os.environ[variable].lower() in _OFFLINE:
        yield Kind.storage.error(
            id="hub-model",
            what=f"the weights of {name} are not in the hub's cache, and {variable} forbids to fetch them",
            fix=f"where there is a network: hf download {name}{at}; then copy the cache here, or unset {variable}",
            data={"name": name},
        )
    else:
        what = f"{name} is not in the hub's cache: the first run downloads it"
        yield Kind.storage.ok(id="hub-model", what=what, data={"name": name})


def _first_set(variables: Sequence[str]) -> str | None:
    return next((name for name in variables if os.environ.get(name)), None)


def _token(config: RunConfig | None) -> Finding:
    """Report whether there is a hub token, without printing it or contacting the hub."""
    from huggingface_hub import constants, get_token

    file = Path(constants.HF_TOKEN_PATH)
    if problem := unreadable_token():
        return Kind.storage.error(
            id="hub-token", what=problem.what, fix=problem.fix, data={"is_there": False, "source": None}
        )
    is_there = get_token() is not None
    source = _first_set(_TOKEN_VARIABLES) or str(file)
    target = config.training.push_to_hub if config is not None else None
    data = {"is_there": is_there, "source": source if is_there else None}
    if not is_there and target is not None:
        return Kind.storage.error(
            id="hub-token",
            what=f"training.push_to_hub={target} needs a token for the hub, and there is none",
            fix="hf auth login, or HF_TOKEN in the environment; or training.push_to_hub=null",
            data=data,
        )
    if not is_there:
        what = "no token for the hub: gated models cannot be downloaded (hf auth login, or HF_TOKEN)"
        return Kind.storage.ok(id="hub-token", what=what, data=data)
    if _is_open_to_others(file):
        return Kind.storage.warning(
            id="hub-token",
            what=f"the hub's token in {file} can be read by other users",
            fix=f"chmod 600 {file}",
            data=data,
        )
    return Kind.storage.ok(id="hub-token", what=f"a token for the hub is in {source}", data=data)


def _is_open_to_others(file: Path) -> bool:
    try:
        mode = file.stat().st_mode
    except OSError:  # it does not exist, or its folder is not readable
        return False
    return stat.S_ISREG(mode) and bool(stat.S_IMODE(mode) & 0o044)
