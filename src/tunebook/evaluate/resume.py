"""Resume an evaluation: which model has computed the kept answers, and the command that uses them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from tunebook.checkpoint.choose import same_command
from tunebook.config.choices import Weights
from tunebook.config.frozen import load_config
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.facts.attention import WITHOUT_KERNEL
from tunebook.files import remembered_hash, sha256_text
from tunebook.model.adapters import is_adapter
from tunebook.model.load import load_architecture, weights_folder
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.run_folder import RUN_FILE

BEFORE, AFTER = "before", "after"  # evaluations that belong to a training
_HASHED = ("config.json", "generation_config.json", "adapter_config.json", "adapter_model.*")


def resume_command(run: Path, when: str) -> str:
    """Return the command that resumes an evaluation, which may be part of a training."""
    if when not in (BEFORE, AFTER):
        return "the same command"
    # Before the first step, a new start finds no progress that leads to the folder, so the command must name it.
    option = f"--run-folder {shlex.quote(str(run))}" if when == BEFORE else ""
    return same_command(load_config(run / RUN_FILE), option)


def model_identity(config: RunConfig, folder: Path | None) -> dict[str, Any]:
    """Describe everything that determines a model's answers except its tokenizer: weights, formats, attention."""
    identity: dict[str, Any] = {
        "master_weights": config.precision.master_weights.name,
        "compute": config.precision.compute.name,
        "peft": config.peft.method.name,
        "is_eager": config.attention.implementation is WITHOUT_KERNEL,
    }
    if folder is not None:
        identity["model"] = _content_of(folder)
    if folder is None or is_adapter(folder):
        is_random = config.model.weights is Weights.random
        identity["base"] = _random_weights(config) if is_random else _content_of(weights_folder(config.model))
    return identity


def _random_weights(config: RunConfig) -> dict[str, Any]:
    import torch

    architecture = load_architecture(config.model).to_json_string(use_diff=False)
    return {"seed": config.training.seed, "architecture": sha256_text(architecture), "drawn_by": torch.__version__}


def _content_of(folder: Path) -> dict[str, Any]:
    files = sorted(file for pattern in _HASHED for file in folder.glob(pattern))
    hashes: dict[str, Any] = {file.name: remembered_hash(file) for file in files}
    return hashes | {"weights": weights_fingerprint(ModelConfig(path=str(folder)))}
