"""Rotary positions stretched by YaRN, against the paper's formula, transformers' own reading, and saved models."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.facts.architectures import YARN_ARCHITECTURES
from tunebook.model.load import load_architecture
from tunebook.model.positions import positions_of, stretch_positions, yarn_refusal

from .conftest import TYPES, daily

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


def architecture_of(kind, **more):
    return AutoConfig.for_model(kind, **SIZES | (EXPERTS if "moe" in kind else {}) | more)


def rotations(model):
    """The speed of each rotation in radians per position, and by how much cosines and sines are multiplied."""
    (rotary,) = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    return rotary.inv_freq.double(), rotary.attention_scaling


def by_the_paper(plain, factor, original):
    """Section 3.2 of arXiv:2309.00071, as its authors' code has it.

    Rotations that turn 32 times and more in the original positions stay as they are, those that turn less than once
    are slowed by the factor, and those between lie on a ramp by their number.
    """

    def number_of(turns, base, dim):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    dim = 2 * len(plain)
    base = (1 / plain[1]) ** (dim / 2)
    low, high = (math.floor(number_of(32, base, dim)), math.ceil(number_of(1, base, dim)))
    low, high = max(low, 0), min(high, dim - 1)
    slowed = ((torch.arange(len(plain), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - slowed) + plain / factor * slowed


@pytest.mark.parametrize("name", daily(sorted(YARN_ARCHITECTURES), "LlamaForCausalLM", "Qwen3MoeForCausalLM"))
def test_rotations_are_those_of_the_paper_and_of_a_stretched_config(name):
    architecture = architecture_of(TYPES[name])
    plain, _ = rotations(AutoModelForCausalLM.from_config(architecture))
    stretch_positions(architecture, ModelConfig(yarn_factor=8, yarn_original_positions=256))
    speeds, scaling = rotations(AutoModelForCausalLM.from_config(architecture))
    torch.testing.assert_close(speeds, by_the_paper(plain, 8, 256), rtol=1e-5, atol=0)
    assert scaling == pytest.approx(0.1 * math.log(8) + 1)
    assert architecture.max_position_embeddings == 2048
    stated = {"factor": 8.0, "original_max_position_embeddings": 256, "rope_type": "yarn"}
    own = architecture_of(
        TYPES[name], rope_parameters=stated | {"rope_theta": architecture.rope_parameters["rope_theta"]}
    )
    torch.testing.assert_close(speeds, rotations(AutoModelForCausalLM.from_config(own))[0], rtol=0, atol=0)


def test_a_saved_model_stays_stretched_once(tmp_path):
    architecture, model = architecture_of("qwen3"), ModelConfig(yarn_factor=4)
    stretch_positions(architecture, model)
    architecture.architectures = ["Qwen3ForCausalLM"]
    architecture.save_pretrained(tmp_path)
    saved = ModelConfig(path=str(tmp_path), weights="random")
    for factor, original in ((4, None), (4, 512), (None, None)):
        again = load_architecture(replace(saved, yarn_factor=factor, yarn_original_positions=original))
        assert again.rope_parameters == architecture.rope_parameters
        assert again.max_position_embeddings == 2048
    for factor, original in ((8, None), (4, 256)):
        with pytest.raises(RequestError) as caught:
            load_architecture(replace(saved, yarn_factor=factor, yarn_original_positions=original))
        assert caught.value.problem_id == "yarn-not-possible"


@pytest.mark.parametrize(
    "kind", ["gpt2", "gpt_oss", "gemma3_text"], ids=["not_rotary", "stretched_already", "of_several_kinds"]
)
def test_other_positions_are_not_stretched(kind):
    with pytest.raises(RequestError) as caught:
        stretch_positions(AutoConfig.for_model(kind), ModelConfig(yarn_factor=2))
    assert caught.value.problem_id == "yarn-not-possible"


FACTS = ModelFacts(architecture="Qwen3ForCausalLM", max_position_embeddings=512)


def test_positions_by_factor():
    assert positions_of(ModelConfig(yarn_factor=4)) is None
    assert positions_of(ModelConfig(facts=FACTS)) == 512
    assert positions_of(ModelConfig(facts=FACTS, yarn_factor=2.5)) == 1280
    assert positions_of(ModelConfig(facts=FACTS, yarn_factor=4, yarn_original_positions=256)) == 1024


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "several kinds"),
    ],
)
def test_the_plan_reads_the_config_of_a_local_model(tmp_path, stated, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | stated))
    refusal = yarn_refusal(ModelConfig(path=str(tmp_path), facts=FACTS, yarn_factor=2))
    assert refusal is None if reason is None else reason in refusal
