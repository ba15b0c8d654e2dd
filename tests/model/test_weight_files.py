"""The weights in a model's folder, read from the headers in transformers' order and verified."""

from __future__ import annotations

import hashlib
import json
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

from .conftest import daily

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


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


def test_a_file_that_only_the_index_knows_is_missing(sharded: Path) -> None:
    (sharded / FIRST).unlink()
    with pytest.raises(RequestError, match=FIRST) as raised:
        find_weight_files(sharded)
    assert raised.value.problem_id == "weights-file-missing"


@pytest.mark.parametrize("text", ["{", '{"metadata": {}}'])
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RequestError, match=r"index\.json") as raised:
        find_weight_files(sharded)
    assert raised.value.problem_id == "weights-file-damaged"


@pytest.mark.parametrize("kept", [0, -1], ids=["empty", "one byte short"])
def test_a_file_that_was_cut_off(sharded: Path, kept: int) -> None:
    whole = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(whole[:kept])
    with pytest.raises(RequestError, match=SECOND) as raised:
        read_shapes(find_weight_files(sharded))
    assert raised.value.problem_id == "weights-file-damaged"


class Hostile:
    """Unpickling it writes a file."""

    def __init__(self, written: Path) -> None:
        self.written = written

    def __reduce__(self) -> Any:
        return (Path.touch, (self.written,))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Hostile(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(RequestError) as raised:
        read_shapes([tmp_path / "pytorch_model.bin"])
    assert raised.value.problem_id == "weights-file-damaged"
    assert not (tmp_path / "ran").exists()


def make(kind: str, **sizes: object) -> PreTrainedModel:
    more = {"head_dim": 8} if kind.startswith("gemma") else {"pad_token_id": 0} if kind == "phi3" else {}
    architecture = AutoConfig.for_model(kind, **(SIZES | more | sizes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture)
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
