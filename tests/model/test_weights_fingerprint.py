"""The fingerprint of weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.model.weight_files import weights_fingerprint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    return ModelConfig(path=str(tmp_path / "model"))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_of_one_file_it_is_its_hash(model: ModelConfig, name: str) -> None:
    (Path(str(model.path)) / name).write_bytes(b"weights")
    assert weights_fingerprint(model) == hashlib.sha256(b"weights").hexdigest()


def test_of_several_files_each_counts(model: ModelConfig) -> None:
    folder = Path(str(model.path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1", "b": "2"}}))
    found = set()
    for first, second in ((b"a", b"b"), (b"x", b"b"), (b"a", b"x"), (b"b", b"a")):
        (folder / "1").write_bytes(first)
        (folder / "2").write_bytes(second)
        found.add(weights_fingerprint(model))
    assert len(found) == 4 and None not in found


def test_no_fingerprint_for_random_and_hub_weights(model: ModelConfig) -> None:
    assert weights_fingerprint(ModelConfig(name="org/model")) is None
    assert weights_fingerprint(model) is None
    (Path(str(model.path)) / "model.safetensors").write_bytes(b"not looked at")
    model.weights = Weights.random
    assert weights_fingerprint(model) is None
