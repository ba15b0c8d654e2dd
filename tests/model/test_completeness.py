"""Stored weights against the model: every architecture's own saved weights pass, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tunebook.errors import RequestError
from tunebook.model.completeness import check_stored_weights, compare_shapes

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "gpt_neox", "mixtral")
MIDDLE = "model.layers.1.mlp.up_proj.weight"


def make(kind: str, **sizes: object) -> PreTrainedModel:
    more = {"head_dim": 8} if kind.startswith("gemma") else {"pad_token_id": 0} if kind == "phi3" else {}
    architecture = AutoConfig.for_model(kind, **(SIZES | more | sizes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture)
    return model


@pytest.fixture
def untied() -> PreTrainedModel:
    return make("llama", tie_word_embeddings=False)


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_architecture_saves_fills_it(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path)
    check_stored_weights(make(kind), tmp_path)


def test_experts_that_are_stored_one_by_one_fill_the_model(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in stored  # the model has one tensor for all of them
    del stored["model.layers.0.block_sparse_moe.gate.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match=r"1 missing keys such as model\.layers\.0\.\S+gate\S*weight;"):
        check_stored_weights(make("mixtral"), tmp_path)


@pytest.mark.parametrize("stored_under", [["model.embed_tokens.weight"], ["lm_head.weight"], None], ids=str)
def test_a_tied_weight_is_stored_under_any_of_its_names(stored_under: list[str] | None) -> None:
    model = make("qwen2", tie_word_embeddings=True)
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    kept = {name: shape for name, shape in shapes_of(model).items() if stored_under is None or name not in names}
    kept |= dict.fromkeys(stored_under or [], (64, 16))
    assert compare_shapes(model, kept) == {"missing": [], "unexpected": [], "mismatched": []}


def test_a_tied_weight_that_is_not_stored_at_all_is_missing() -> None:
    model = make("qwen2", tie_word_embeddings=True)
    rest = {name: shape for name, shape in shapes_of(model).items() if name.startswith("model.layers")}
    missing = compare_shapes(model, rest)["missing"]
    assert "model.embed_tokens.weight" in missing and "model.norm.weight" in missing


def test_an_untied_head_must_be_stored(untied: PreTrainedModel) -> None:
    stored = shapes_of(untied)
    del stored["lm_head.weight"]
    assert compare_shapes(untied, stored)["missing"] == ["lm_head.weight"]


def test_buffers_of_old_checkpoints_are_no_surprise(untied: PreTrainedModel) -> None:
    stored = shapes_of(untied) | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    assert compare_shapes(untied, stored)["unexpected"] == []


def test_weights_of_the_base_model_alone_have_no_prefix(untied: PreTrainedModel) -> None:
    stored = {name.removeprefix("model."): shape for name, shape in shapes_of(untied).items()}
    assert compare_shapes(untied, stored) == {"missing": [], "unexpected": [], "mismatched": []}


def test_each_kind_of_difference_is_named(untied: PreTrainedModel, tmp_path: Path) -> None:
    weights = {name: weight.clone() for name, weight in untied.state_dict().items()}
    del weights[MIDDLE]
    weights["model.norm.weight"] = torch.zeros(17)
    weights["extra.weight"] = torch.zeros(2)
    untied.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RequestError) as raised:
        check_stored_weights(untied, tmp_path)
    assert (raised.value.exit_code, raised.value.problem_id) == (2, "weights-incomplete")
    for part in (
        f"1 missing keys such as {MIDDLE}",
        "1 mismatched keys such as model.norm.weight of shape [17], where the model has [16]",
        "1 unexpected keys such as extra.weight",
        str(tmp_path),
    ):
        assert part in raised.value.message


def test_weights_that_are_stored_quantised_are_left_to_their_library(untied: PreTrainedModel, tmp_path: Path) -> None:
    save_file({"extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    untied.config.quantization_config = {"quant_method": "bitsandbytes"}
    check_stored_weights(untied, tmp_path)


def test_a_folder_without_weights_is_for_others_to_refuse(untied: PreTrainedModel, tmp_path: Path) -> None:
    check_stored_weights(untied, tmp_path)
