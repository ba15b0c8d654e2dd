"""The weights in a model's folder, read from the headers in transformers' order and verified."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.model.weight_files import (
    check_stored_weights,
    find_weight_files,
    read_shapes,
    weights_fingerprint,
)

from .conftest import SMALL, daily

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files with an index: a (2, 3) and b (4,) in the first, c (5, 1) in the second."""
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / FIRST)
    save_file({"c": torch.zeros(5, 1)}, tmp_path / SECOND)
    index = {"metadata": {}, "weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_files_are_read_in_the_order_of_transformers(sharded: Path) -> None:
    torch.save({"a": torch.zeros(2, 3)}, sharded / "pytorch_model.bin")
    assert read_shapes([sharded / "pytorch_model.bin"]) == {"a": (2, 3)}
    files = find_weight_files(sharded)
    assert [file.name for file in files] == [FIRST, SECOND]
    assert read_shapes(files) == {"a": (2, 3), "b": (4,), "c": (5, 1)}
    save_file({}, sharded / "model.safetensors")
    assert [file.name for file in find_weight_files(sharded)] == ["model.safetensors"]
    save_file({}, sharded / "consolidated.safetensors")  # another library's name: transformers does not read it
    assert [file.name for file in find_weight_files(sharded)] == ["model.safetensors"]


class Hostile:
    """Unpickling it writes a file."""

    def __init__(self, written: Path) -> None:
        self.written = written

    def __reduce__(self) -> Any:
        return (Path.touch, (self.written,))


@pytest.mark.parametrize(
    ("name", "content", "problem_id"),
    [
        (FIRST, None, "weights-file-missing"),
        ("model.safetensors.index.json", b"{", "weights-file-damaged"),
        ("model.safetensors.index.json", b'{"metadata": {}}', "weights-file-damaged"),
        (SECOND, b"", "weights-file-damaged"),
        (SECOND, "one byte short", "weights-file-damaged"),
        ("pytorch_model.bin", "hostile", "weights-file-damaged"),
    ],
)
def test_files_that_are_missing_damaged_or_run_code(sharded: Path, name: str, content: Any, problem_id: str) -> None:
    file = sharded / name
    if content == "hostile":
        torch.save({"a": Hostile(sharded / "ran")}, file)
    elif content is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if content == "one byte short" else content)
    with pytest.raises(RequestError, match=re.escape(name)) as raised:
        read_shapes([file] if content == "hostile" else find_weight_files(sharded))
    assert raised.value.problem_id == problem_id
    assert not (sharded / "ran").exists()


def make(kind: str, **sizes: object) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | sizes))
    return model


@pytest.mark.parametrize("kind", daily(("llama", "gemma", "phi3", "gpt_neox", "mixtral"), "llama", "mixtral"))
def test_saved_model_is_complete(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path)
    check_stored_weights(make(kind), tmp_path)


def test_experts_that_are_stored_one_by_one_fill_the_model(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in stored  # the model has one tensor for all of them
    del stored["model.layers.0.block_sparse_moe.gate.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match=r"model\.layers\.0\.\S+gate\S*weight"):
        check_stored_weights(make("mixtral"), tmp_path)


def test_each_kind_of_difference_is_named_unless_the_weights_are_quantized(tmp_path: Path) -> None:
    model = make("llama", tie_word_embeddings=False)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    del weights["lm_head.weight"]
    weights["model.norm.weight"] = torch.zeros(17)
    weights["extra.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RequestError) as raised:
        check_stored_weights(model, tmp_path)
    assert raised.value.problem_id == "weights-incomplete"
    for name in ("lm_head.weight", "model.norm.weight of shape [17]", "extra.weight"):
        assert name in raised.value.message
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    check_stored_weights(model, tmp_path)


def test_the_fingerprint_of_a_file_is_its_hash_and_of_several_depends_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    folder, model = tmp_path / "model", ModelConfig(path=str(tmp_path / "model"))
    folder.mkdir()
    assert weights_fingerprint(model) is None
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1", "b": "2"}}))
    fingerprints = set()
    for first, second in ((b"a", b"b"), (b"x", b"b"), (b"a", b"x"), (b"b", b"a")):
        (folder / "1").write_bytes(first)
        (folder / "2").write_bytes(second)
        fingerprints.add(weights_fingerprint(model))
    assert len(fingerprints) == 4 and None not in fingerprints
    (folder / "model.safetensors").write_bytes(b"weights")
    assert weights_fingerprint(model) == hashlib.sha256(b"weights").hexdigest()
    assert weights_fingerprint(replace(model, weights=Weights.random)) is None
