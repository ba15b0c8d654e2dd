from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config.choices import Compute
from tunebook.config.schema import RunConfig
from tunebook.evaluate import identity
from tunebook.evaluate.identity import fingerprint, model_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("model.safetensors", "config.json", "generation_config.json", "README.md"):
        (made / name).write_text(f"what {name} holds")
    return made


def test_a_copy_is_the_same_model_and_other_content_is_not(folder: Path, cpu_config: RunConfig) -> None:
    before = model_identity(cpu_config, folder)
    os.utime(folder / "model.safetensors", (0, 0))
    (folder / "README.md").write_text("changed")
    assert model_identity(cpu_config, folder) == before
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        old = (folder / name).read_text()
        (folder / name).write_text(old.upper())
        assert model_identity(cpu_config, folder) != before
        (folder / name).write_text(old)
    assert model_identity(cpu_config, folder) == before


def test_large_files_are_told_apart_by_size_time_and_both_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_READ_WHOLE_BYTES", 10)
    monkeypatch.setattr(identity, "_END_BYTES", 4)
    file = folder / "model.safetensors"

    def seen(text: str, time_ns: int = 7) -> str:
        file.write_text(text)
        os.utime(file, ns=(time_ns, time_ns))
        return fingerprint(folder)[file.name]

    first = seen("head and much more tail")
    assert seen("head and much more tail") == first
    assert len({first, seen("Head and much more tail"), seen("head and much more taiL"), seen("head more tail")}) == 4
    assert seen("head and much more tail", time_ns=8) != first


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
    assert set(first["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    other_base = replace(cpu_config, training=replace(cpu_config.training, seed=cpu_config.training.seed + 1))
    assert model_identity(other_base, tmp_path) != first
