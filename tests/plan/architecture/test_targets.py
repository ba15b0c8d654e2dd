"""What PEFT puts adapters on, by name, against what it trains of real models, and what is kept beside experts."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import Attention, MasterWeights, PeftMethod
from tunebook.config.model_facts import facts_from_json
from tunebook.model.parameters import count_parameters
from tunebook.plan.architecture import measure, saved, targets
from tunebook.plan.architecture.kernels import CudaAutocast
from tunebook.plan.architecture.layers import decoder_layers, kinds_of, text_decoder, traced_places
from tunebook.plan.memory.kept import kept_by_layers

from .conftest import GROUPED, QUIET, SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about what it makes of experts

TOKENS = 126
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODES = (("autocast", "adapter", "sdpa"), ("bf16", "adapter", "sdpa"), ("bf16", "full", "sdpa"))
WAYS = ("", "/offloaded", "/tiled")


@pytest.fixture(scope="module")
def answers():
    """What was found of a kind in some modes: looked at once."""
    return {}


@pytest.fixture
def planned(sound, folder_of, monkeypatch, answers):
    """`planned("phi3", ["qkv_proj"])`: LoRA of rank 3 on one row of a small model that was looked at in some modes."""

    def plan(kind, names, modes=()):
        monkeypatch.setattr(saved, "_MODES", modes)
        if (kind, modes) not in answers:
            answers[kind, modes] = measure.describe(folder_of(kind) / "config.json", trust_remote_code=False)
        sound.model.facts = facts_from_json(answers[kind, modes])
        sound.peft.method, sound.peft.rank, sound.peft.dropout = PeftMethod.lora, 3, 0.0
        sound.peft.target_modules, sound.attention.implementation = names, Attention.sdpa
        sound.packing.row_length = TOKENS
        return sound

    return plan


def with_adapters(config, names, **options):
    model = AutoModelForCausalLM.from_config(config, **options)
    lora = LoraConfig(r=3, target_modules=names or "all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3", []),
        ("qwen3", ["q_proj", "v_proj"]),
        ("qwen3", ["self_attn.o_proj", "mlp.down_proj"]),
        ("phi3", []),
        ("phi3", ["qkv_proj"]),
        ("phi3", ["o_proj", "gate_up_proj"]),
        ("gpt_neox", []),
        ("gpt_neox", ["query_key_value"]),
        ("gpt_neox", ["dense", "dense_4h_to_h"]),
        ("gpt2", ["c_attn"]),
        ("mixtral", []),
        ("mixtral", ATTENTION),
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("mixtral", ["gate", "v_proj"]),
        ("qwen3_moe", []),
        ("qwen3_moe", ["q_proj", "v_proj"]),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen3", ["q_proj", "embed_tokens", "lm_head"]),
    ],
    ids=lambda value: "-".join(value) or "all" if isinstance(value, list) else value,
)
def test_as_many_parameters_are_trained_as_peft_trains(planned, config_of, kind, names):
    plan = planned(kind, names)
    trained = sum(each.numel() for each in with_adapters(config_of(kind), names).parameters() if each.requires_grad)
    assert count_parameters(plan, plan.model.facts).trained == trained


def really_saved(config, names, dtype):
    """Bytes that the layers of a real pass over two documents in one row keep; copies of weights are left out."""
    model = with_adapters(config, names, attn_implementation="sdpa", dtype=dtype).train()
    model.enable_input_require_grads()
    decoder, now, found = model.get_base_model().model, [False], {}
    of_weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {shape for one in model.parameters() for shape in (tuple(one.shape), tuple(reversed(one.shape)))}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights and tuple(tensor.shape) not in shapes:
            found.setdefault(storage.data_ptr(), (now[0], storage.nbytes(), tensor))
        return tensor

    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda *_: now.__setitem__(0, True))
        layer.register_forward_hook(lambda *_: now.__setitem__(0, False))
    half = torch.arange(TOKENS // 2)
    row = {"input_ids": torch.randint(0, 100, (1, TOKENS)), "position_ids": torch.cat([half, half])[None]}
    mixed = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed, CudaAutocast():
        decoder(**row, use_cache=False)
    return sum(size for is_inside, size, _ in found.values() if is_inside)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "names", [["q_proj", "v_proj"], ATTENTION, ["gate", *ATTENTION], []], ids=["two", "four", "router", "all"]
)
@pytest.mark.parametrize("number_format", ["autocast", "bf16"])
def test_experts_are_kept_with_adapters_and_without(planned, config_of, kind, names, number_format):
    """Within 5%: an adapter's middle numbers are those of rank 1, and the experts' product is another one here."""
    plan = planned(kind, names, modes=MODES)
    plan.precision.master_weights = MasterWeights.bf16 if number_format == "bf16" else MasterWeights.fp32
    dtype = torch.bfloat16 if number_format == "bf16" else torch.float32
    kept = kept_by_layers(plan, plan.model.facts)
    assert kept == pytest.approx(really_saved(config_of(kind), names, dtype), rel=0.05)


def test_only_stacked_experts_are_looked_at_twice(planned):
    measured = planned("mixtral", [], modes=MODES).model.facts.measured
    looked_at = {f"{number_format}/adapter/sdpa{way}" for number_format in ("autocast", "bf16") for way in WAYS}
    assert {*measured.saved_beside_experts} == looked_at
    beside, everywhere = (numbers["bf16/adapter/sdpa"] for numbers in (measured.saved_beside_experts, measured.saved))
    assert beside[1] < everywhere[1]
    assert planned("llama", [], modes=MODES).model.facts.measured.saved_beside_experts == {}


def test_names_of_experts_are_those_before_they_were_stacked(config_of):
    with torch.device("meta"):
        found = {kind: AutoModelForCausalLM.from_config(config_of(kind)) for kind in ("mixtral", "qwen3_moe", "llama")}
    assert targets.stacked_names(found["mixtral"]) == {
        "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",), "gate.weight": ("gate",),
    }  # fmt: skip
    assert targets.stacked_names(found["qwen3_moe"])["gate_up_proj"] == ("gate_proj", "up_proj")
    assert targets.stacked_names(found["llama"]) == {}
    assert {kind: targets.has_stacked_experts(model) for kind, model in found.items()} == {
        "mixtral": True, "qwen3_moe": True, "llama": False,
    }  # fmt: skip
    assert targets.names_beside_experts(found["qwen3_moe"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


# Architectures with a linear layer that returns something else: its name, and sizes.
UNLIKE = {
    "phimoe": ("router", {"num_local_experts": 4}),
    "llama4_text": ("router", {"num_local_experts": 4, "interleave_moe_layer_step": 1}),
    "deepseek_v4": (
        "o_a_proj",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "o_groups": 2},
    ),
}


@pytest.fixture
def config_unlike():
    """`config_unlike("phimoe")`: a small config of one of `UNLIKE`."""
    common = {**SIZES, **GROUPED, **QUIET, "num_hidden_layers": 4}
    return lambda kind: AutoConfig.for_model(kind, **common | UNLIKE[kind][1])


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_linear_layer_that_returns_something_else_is_not_adapted(config_unlike, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(saved, "_MODES", ())
    config_unlike(kind).save_pretrained(tmp_path)
    found = measure.describe(tmp_path / "config.json", trust_remote_code=False)["measured"]
    assert found["not_adapted"] == [UNLIKE[kind][0]]
    assert not {UNLIKE[kind][0]} & {*found["adapters"], *found["expert_adapters"]} and found["adapters"]
    adapters = found["adapters"].values(), found["expert_adapters"].values()
    assert found["adapter_parameters"] == sum(sum(sizes) for each in adapters for sizes in each)


def test_an_adapter_on_it_fails_in_the_first_pass_and_those_on_all_others_do_not(config_unlike):
    words, config = {"input_ids": torch.ones(1, 5, dtype=torch.long)}, config_unlike("phimoe")
    names = targets.names_to_adapt(model_of(config))
    assert names == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert with_adapters(config, names)(**words).logits.shape == (1, 5, 100)
    with pytest.raises(AttributeError, match="tuple"):
        with_adapters(config, [])(**words)


@pytest.mark.parametrize("method", ["adapter", "beside"])
def test_layers_with_such_a_router_are_traced_with_adapters(config_unlike, method):
    config = config_unlike("phimoe")
    layers = decoder_layers(text_decoder(model_of(config)), 4)
    kinds = kinds_of(config, layers)
    places = traced_places(config, kinds, {})
    found = saved._measure(config, kinds, places, ("bf16", method, "sdpa"), {})
    assert found[f"bf16/{method}/sdpa"][1] > 0


def model_of(config):
    return AutoModelForCausalLM.from_config(config)


def test_layers_that_compute_a_linear_layer_in_their_own_way_are_adapted():
    config = AutoConfig.for_model("falcon", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=100)
    assert type(model_of(config).transformer.h[0].mlp.dense_h_to_4h).__name__ == "FalconLinear"
    assert targets.unlike_linear(model_of(config)) == targets.names_to_adapt(model_of(config)) == []
