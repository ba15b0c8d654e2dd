"""What goes on with an evaluation: of a training the words that go on with that."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tunebook.config.choices import Compute
from tunebook.config.schema import RunConfig
from tunebook.evaluate.resume import model_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    save_file({"weight": torch.zeros(2)}, made / "model.safetensors")
    for name in ("config.json", "generation_config.json", "README.md"):
        (made / name).write_text(f"what {name} holds")
    return made


def test_a_copy_is_the_same_model_and_other_content_is_not(folder: Path, cpu_config: RunConfig) -> None:
    before = model_identity(cpu_config, folder)
    os.utime(folder / "model.safetensors", (0, 0))
    (folder / "README.md").write_text("changed")
    assert model_identity(cpu_config, folder) == before
    for name in ("config.json", "generation_config.json"):
        old = (folder / name).read_text()
        (folder / name).write_text(old.upper())
        assert model_identity(cpu_config, folder) != before
        (folder / name).write_text(old)
    assert model_identity(cpu_config, folder) == before
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    assert model_identity(cpu_config, folder) != before


def test_random_weights_are_told_apart_by_seed_and_formats(cpu_config: RunConfig) -> None:
    first = model_identity(cpu_config, None)
    assert model_identity(cpu_config, None) == first
    other_seed = replace(cpu_config, training=replace(cpu_config.training, seed=cpu_config.training.seed + 1))
    other_format = replace(cpu_config, precision=replace(cpu_config.precision, compute=Compute.bf16))
    assert model_identity(other_seed, None) != first
    assert model_identity(other_format, None) != first


def test_an_adapter_is_told_apart_by_its_base_too(tmp_path: Path, cpu_config: RunConfig) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("adapter")
    first = model_identity(cpu_config, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_text("another adapter")
    assert model_identity(cpu_config, tmp_path) != first
    first = model_identity(cpu_config, tmp_path)
    other_base = replace(cpu_config, training=replace(cpu_config.training, seed=cpu_config.training.seed + 1))
    assert model_identity(other_base, tmp_path) != first
