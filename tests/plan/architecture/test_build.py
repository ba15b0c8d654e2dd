"""What is found without memory against the real model, and what cannot be built."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import PeftMethod
from tunebook.errors import RequestError
from tunebook.model.load import largest
from tunebook.model.parameters import count_parameters
from tunebook.plan.architecture import build, targets
from tunebook.plan.architecture.layers import decoder_layers, text_decoder

from .conftest import GROUPED, QUIET, SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about what it makes of GPT-2's layers and of experts


def described(folder, **changes):
    file = folder / "config.json"
    if changes:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return build.describe_file(file, trust_remote_code=False)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_neox", "gemma2", "mixtral", "phi3"])
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
    assert (found.linear_parameters, found.experts_per_token) == (linear, 2)
    assert found.active_parameters == found.parameters - left_out < found.parameters
    assert found.largest_parameter == max(each.numel() for each in layers.parameters() if each.dim() == 3)
    dense = described(folder_of("llama")).measured
    assert (dense.experts_per_token, dense.active_parameters) == (0, dense.parameters)


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
def test_layers_attend_to_a_document_or_to_a_window(config_of, kind, expected):
    other = {
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4},
        "falcon_h1": {**SIZES, "num_hidden_layers": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    }
    config = AutoConfig.for_model(kind, **other[kind]) if kind in other else config_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(text_decoder(model), config.num_hidden_layers)
    assert tuple(build._attention_widths(layers, config).values()) == expected


@pytest.mark.parametrize(
    ("changes", "problem", "said"),
    [
        ({"model_type": "lama9"}, "unknown-architecture", r"model_type=lama9, architectures=\[.*mean 'llama'\?\), or"),
        ({"model_type": "foobar", "architectures": None}, "unknown-architecture", "=foobar; correct model_type in the"),
        ({"model_type": "t5"}, "model-not-causal", "model_type=t5, architectures=.* is an encoder-decoder, which is"),
        ({"model_type": "qwen2_vl"}, "model-not-causal", "is a model of images or sound and text"),
        ({"hidden_act": "nonsense"}, "model-config", r"no model can be built with these sizes \(KeyError: 'nonsense'"),
    ],
    ids=str,
)
def test_what_cannot_be_built(folder_of, changes, problem, said):
    with pytest.raises(RequestError, match=said) as caught:
        described(folder_of("llama"), **changes)
    assert caught.value.problem_id == problem


def test_a_model_that_no_pass_goes_through(folder_of):
    with pytest.raises(RequestError, match="k not in range") as caught:
        described(folder_of("mixtral"), num_experts_per_tok=20)
    assert caught.value.problem_id == "model-config"


def test_a_fault_of_the_machine_is_not_taken_for_one_of_the_model(folder_of, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    with pytest.raises(MemoryError):
        described(folder_of("llama"))


@pytest.mark.parametrize("error", [DataDependentOutputException("item"), None], ids=["no values", "none"])
def test_a_model_whose_pass_cannot_be_followed_is_not_refused(folder_of, monkeypatch, error):
    def forward(*_, **__):
        if error is not None:
            raise error

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", forward)
    facts = described(folder_of("llama"))
    assert (facts.architecture, facts.unreached) == ("LlamaForCausalLM", [])
    assert "varlen_attention" not in facts.measured.attention


CODE = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}


@pytest.mark.parametrize("kind", ["phi3", "own"])
def test_absent_code_of_the_model(folder_of, kind):
    file = folder_of("phi3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind, "auto_map": CODE}))
    with pytest.raises(RequestError, match=r"folder: configuration_own\.py, modeling_own\.py; copy") as caught:
        build.describe_file(file, trust_remote_code=True)
    assert caught.value.problem_id == "model-config"
    for name in ("configuration_own.py", "modeling_own.py"):
        (file.parent / name).touch()
    with pytest.raises(RequestError, match="no model can be built"):
        build.describe_file(file, trust_remote_code=True)


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
    assert ({"varlen_attention", "varlen_attention_4", "sdpa_by_document"} & found != set()) is expected
    assert ("sdpa" in found) is (kind != "gemma2")


def test_of_the_kernels_by_lengths_one_computes_attention_sinks(folder_of):
    found = described(folder_of("gpt_oss")).measured.attention
    assert found == ["eager", "flex_attention", "flash_attention_4", "varlen_attention"]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("mamba", {"state_size": 4}), ("falcon_mamba", {"state_size": 4}), ("rwkv", {"attention_hidden_size": 32})],
)
def test_models_without_attention_have_facts_too(tmp_path, kind, sizes):
    config = AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=2, vocab_size=50, **sizes)
    config.save_pretrained(tmp_path)
    facts, model = described(tmp_path), AutoModelForCausalLM.from_config(config)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.num_layers) == (1, 1, 2)
    linear = {name: each for name, each in model.base_model.named_modules() if isinstance(each, torch.nn.Linear)}
    refused = ["out_proj"] if "mamba" in kind else []  # by PEFT
    assert facts.measured.not_adapted == refused
    taken = [each for name, each in linear.items() if name.rpartition(".")[2] not in refused]
    assert sum(map(sum, facts.measured.adapters.values())) == sum(sum(each.weight.shape) for each in taken)


# Adapters


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def with_adapters(config, names):
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=3, target_modules=names or "all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3", []),
        ("qwen3", ["self_attn.o_proj", "mlp.down_proj"]),
        ("qwen3", ["q_proj", "embed_tokens", "lm_head"]),
        ("phi3", ["qkv_proj"]),
        ("gpt_neox", ["dense", "dense_4h_to_h"]),
        ("gpt2", ["c_attn"]),
        ("mixtral", []),
        ("mixtral", ATTENTION),
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("mixtral", ["gate", "v_proj"]),
        ("qwen3_moe", []),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
    ],
    ids=lambda value: "-".join(value) or "all" if isinstance(value, list) else value,
)
def test_as_many_parameters_are_trained_as_peft_trains(sound, folder_of, config_of, kind, names):
    sound.model.facts = described(folder_of(kind))
    sound.peft.method, sound.peft.rank, sound.peft.target_modules = PeftMethod.lora, 3, names
    trained = sum(each.numel() for each in with_adapters(config_of(kind), names).parameters() if each.requires_grad)
    assert count_parameters(sound, sound.model.facts).trained == trained


# Architectures with a linear layer that returns something else: its name, and sizes.
UNLIKE = {
    "phimoe": ("router", {"num_local_experts": 4}),
    "llama4_text": ("router", {"num_local_experts": 4, "interleave_moe_layer_step": 1}),
    "deepseek_v4": (
        "o_a_proj",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "o_groups": 2},
    ),
}


def config_unlike(kind):
    return AutoConfig.for_model(kind, **{**SIZES, **GROUPED, **QUIET, "num_hidden_layers": 4} | UNLIKE[kind][1])


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_linear_layer_that_returns_something_else_is_not_adapted(tmp_path, kind):
    config_unlike(kind).save_pretrained(tmp_path)
    found = described(tmp_path).measured
    assert found.not_adapted == [UNLIKE[kind][0]]
    assert not {UNLIKE[kind][0]} & {*found.adapters, *found.expert_adapters} and found.adapters


def test_an_adapter_on_it_fails_in_the_first_pass_and_those_on_all_others_do_not():
    words, config = {"input_ids": torch.ones(1, 5, dtype=torch.long)}, config_unlike("phimoe")
    names = targets.names_to_adapt(AutoModelForCausalLM.from_config(config))
    assert names == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert with_adapters(config, names)(**words).logits.shape == (1, 5, 100)
    with pytest.raises(AttributeError, match="tuple"):
        with_adapters(config, [])(**words)


def test_layers_that_compute_a_linear_layer_in_their_own_way_are_adapted():
    config = AutoConfig.for_model("falcon", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=100)
    model = AutoModelForCausalLM.from_config(config)
    assert type(model.transformer.h[0].mlp.dense_h_to_4h).__name__ == "FalconLinear"
    assert targets.not_adapted(model) == targets.names_to_adapt(model) == []
