"""What is found without memory against the real model, and what cannot be built."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import PeftMethod
from tunebook.model.load import largest
from tunebook.model.parameters import count_parameters
from tunebook.plan.architecture import build

from .conftest import GROUPED, SIZES

NIGHTLY = pytest.mark.nightly
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about what it makes of GPT-2's layers and of experts


def described(folder, **changes):
    file = folder / "config.json"
    if changes:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return build.describe_file(file, trust_remote_code=False)


@pytest.mark.parametrize(
    "kind", ["qwen2", "mixtral", *(pytest.param(kind, marks=NIGHTLY) for kind in ("gpt2", "gemma2"))]
)
def test_every_parameter_is_counted(folder_of, config_of, kind):
    facts = described(folder_of(kind))
    model = AutoModelForCausalLM.from_config(config_of(kind))
    in_layers = [part for name, part in model.named_parameters() if any(map(str.isdecimal, name.split(".")))]
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.measured.parameters == sum(parameter.numel() for parameter in in_layers)
    assert facts.tie_word_embeddings is (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    assert facts.measured.num_layers == facts.num_layers == config_of(kind).num_hidden_layers


def test_experts(folder_of, config_of):
    """Of Mixtral's experts, each layer's in one tensor, two are chosen, and none is a linear layer."""
    found, config = described(folder_of("mixtral")).measured, config_of("mixtral")
    layers = AutoModelForCausalLM.from_config(config).model.layers
    experts = sum(each.numel() for each in layers.parameters() if each.dim() == 3)
    linear = sum(each.weight.numel() for each in layers.modules() if isinstance(each, torch.nn.Linear))
    left_out = experts * (config.num_local_experts - config.num_experts_per_tok) // config.num_local_experts
    assert found.linear_parameters == linear
    assert found.active_parameters == found.parameters - left_out < found.parameters
    assert found.largest_parameter == max(each.numel() for each in layers.parameters() if each.dim() == 3)
    dense = described(folder_of("llama")).measured
    assert dense.active_parameters == dense.parameters


def test_text_does_not_reach_an_image_tower(folder_of, config_of):
    found, text = described(folder_of("gemma3")), described(folder_of("gemma3_text"))
    model = AutoModelForCausalLM.from_config(config_of("gemma3"), dtype=torch.float32)
    model(input_ids=torch.arange(10, 40)[None]).logits.sum().backward()
    without = sum(each.numel() for each in model.parameters() if each.grad is None)
    assert found.unreached == ["model.multi_modal_projector", "model.vision_tower"]
    assert found.measured.unreached_parameters == without == found.num_parameters - text.num_parameters
    for name in ("num_layers", "parameters", "adapters", "linear_parameters"):
        assert getattr(found.measured, name) == getattr(text.measured, name)
    assert (text.unreached, text.measured.unreached_parameters) == ([], 0)
    # transformers 5.24: flash attention drops the mask over the tokens of an image
    assert {*text.measured.attention} - {*found.measured.attention} == {
        "flash_attention_2", "flash_attention_3", "flash_attention_4"
    }  # fmt: skip


def test_sizes_of_the_config(folder_of):
    facts = described(folder_of("gpt2"))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [getattr(facts, name) for name in sizes] == [64, 256, 4, 4, 100]  # GPT-2 states no inner size: 4 x hidden
    assert (facts.architecture, facts.max_position_embeddings, facts.dtype) == ("GPT2LMHeadModel", 512, "bfloat16")
    assert described(folder_of("gemma2")).num_key_value_heads == 2


def test_of_sizes_that_each_layer_has_the_largest_counts(tmp_path):
    """Gemma 3n lists the inner sizes of its layers; the loader compares the same one."""
    sizes = SIZES | {"intermediate_size": [32, 48], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    sizes |= {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma3n_text", **sizes, activation_sparsity_pattern=[0.0, 0.0])
    config.save_pretrained(tmp_path)
    facts = described(tmp_path)
    assert facts.intermediate_size == 48 == largest(config.intermediate_size)
    assert facts.measured.looked_up_parameters == 50 * 2 * 8


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", (3 * 64, 0, 0)),
        ("qwen3", (3 * 4 * 32, 0, 0)),
        ("gemma2", (2 * 4 * 32, 2 * 4 * 32, 4096)),
        ("mamba", (0, 0, 0)),
        ("falcon_h1", (2 * 64, 0, 0)),  # each layer is both
    ],
)
def test_layers_attend_to_a_document_or_to_a_window(config_of, tmp_path, kind, expected):
    other = {
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4},
        "falcon_h1": {**SIZES, **GROUPED, "num_hidden_layers": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    }
    config = AutoConfig.for_model(kind, **other[kind]) if kind in other else config_of(kind)
    config.save_pretrained(tmp_path)
    found = described(tmp_path).measured
    assert (found.attention_width, found.sliding_width, found.sliding_window) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, True),
        ("qwen3", {"attention_dropout": 0.1}, False),
        ("gemma2", {}, False),  # caps the logits
        ("gpt2", {}, True),
        ("gpt2", {"attn_pdrop": 0.1}, False),
    ],
)
def test_kernels_by_lengths_are_listed_if_the_model_asks_for_no_more(folder_of, kind, changes, expected):
    found = {*described(folder_of(kind), **changes).measured.attention}
    assert ({"varlen_attention", "sdpa_by_document"} & found != set()) is expected
    assert ("sdpa" in found) is (kind != "gemma2")


def test_of_the_kernels_by_lengths_one_computes_attention_sinks(folder_of):
    found = described(folder_of("gpt_oss")).measured.attention
    assert found == ["eager", "flex_attention", "flash_attention_4", "varlen_attention"]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("mamba", {"state_size": 4}), pytest.param("rwkv", {"attention_hidden_size": 32}, marks=NIGHTLY)],
)
def test_models_without_attention_have_facts_too(tmp_path, kind, sizes):
    config = AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=2, vocab_size=50, **sizes)
    config.save_pretrained(tmp_path)
    facts, model = described(tmp_path), AutoModelForCausalLM.from_config(config)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.num_layers) == (1, 1, 2)
    linear = {name: each for name, each in model.base_model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert sum(map(sum, facts.measured.adapters.values())) == sum(sum(each.weight.shape) for each in linear.values())


# Adapters


def with_adapters(config, names):
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=3, target_modules=names or "all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3", ["self_attn.o_proj", "mlp.down_proj"]),
        ("qwen3", ["q_proj", "embed_tokens", "lm_head"]),
        ("gpt2", ["c_attn"]),
        ("mixtral", []),
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("mixtral", ["gate", "v_proj"]),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
    ],
    ids=lambda value: "-".join(value) or "all" if isinstance(value, list) else value,
)
def test_as_many_parameters_are_trained_as_peft_trains(sound, folder_of, config_of, kind, names):
    sound.model.facts = described(folder_of(kind))
    sound.peft.method, sound.peft.rank, sound.peft.target_modules = PeftMethod.lora, 3, names
    trained = sum(each.numel() for each in with_adapters(config_of(kind), names).parameters() if each.requires_grad)
    assert count_parameters(sound, sound.model.facts).trained == trained
