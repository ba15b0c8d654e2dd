"""What tells one model from another without reading all of it: a fingerprint of the files that it is loaded from.

Small files count by their content. Of large ones (100 GiB of weights take minutes to hash) the size, the time of the
last change and both ends count: a copy with a new time is evaluated again, another model is never taken for this one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tunebook.config.choices import Attention, Weights
from tunebook.config.schema import RunConfig
from tunebook.files import sha256_file
from tunebook.model.adapters import is_adapter
from tunebook.model.hub import WEIGHT_FILES
from tunebook.model.load import load_architecture, weights_folder

_READ_WHOLE_BYTES = 64 * 2**20
_END_BYTES = 2**20
_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json")


def model_identity(config: RunConfig, folder: Path | None) -> dict[str, Any]:
    """Everything that decides a model's answers besides its tokenizer: weights, formats, attention."""
    identity: dict[str, Any] = {
        "master_weights": config.precision.master_weights.name,
        "compute": config.precision.compute.name,
        "peft": config.peft.method.name,
        "is_eager": config.attention.implementation is Attention.eager,
    }
    if folder is not None:
        identity["files"] = fingerprint(folder)
    if folder is None or is_adapter(folder):
        identity["base"] = _base_identity(config)
    return identity


def _base_identity(config: RunConfig) -> dict[str, Any]:
    if config.model.weights is Weights.random:
        import torch

        architecture = load_architecture(config.model).to_json_string(use_diff=False)
        return {
            "seed": config.training.seed,
            "architecture": hashlib.sha256(architecture.encode()).hexdigest(),
            "drawn_by": torch.__version__,
        }
    return {"files": fingerprint(weights_folder(config.model))}


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash for every file of a model folder that its answers depend on."""
    files = {file for pattern in WEIGHT_FILES for file in folder.glob(pattern)}
    files |= {folder / name for name in _SETTINGS if (folder / name).is_file()}
    return {file.name: _file_fingerprint(file) for file in sorted(files)}


def _file_fingerprint(file: Path) -> str:
    status = file.stat()
    if status.st_size <= _READ_WHOLE_BYTES:
        return sha256_file(file)
    found = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with file.open("rb") as stream:
        found.update(stream.read(_END_BYTES))
        stream.seek(-_END_BYTES, 2)
        found.update(stream.read(_END_BYTES))
    return found.hexdigest()
