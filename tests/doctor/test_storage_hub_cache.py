"""Weights in the hub's cache, whole and in part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from tunebook.doctor.storage import CachedWeights, cached_weights

NAME, COMMIT = "some-organisation/some-model", "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"
WHOLE, NONE = CachedWeights(is_complete=True), CachedWeights(is_complete=False)


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the hub's library keeps this model's files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some-organisation--some-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_an_index_counts_only_with_all_of_its_shards(snapshot: Path) -> None:
    assert cached_weights(NAME, None) == NONE
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert cached_weights(NAME, None) == NONE
    (snapshot / "1.safetensors").write_bytes(b"x" * 1000)
    assert cached_weights(NAME, None) == CachedWeights(is_complete=False, num_bytes=1000)
    (snapshot / "2.safetensors").write_bytes(b"x")
    assert cached_weights(NAME, None) == WHOLE
    assert cached_weights(NAME, COMMIT) == WHOLE
    assert cached_weights(NAME, "f" * 40) == NONE


def test_a_single_file_is_all_of_them(snapshot: Path) -> None:
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert cached_weights(NAME, None) == WHOLE


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_a_damaged_index_names_nothing(snapshot: Path, content: str) -> None:
    (snapshot / INDEX).write_text(content)
    assert cached_weights(NAME, None) == NONE
