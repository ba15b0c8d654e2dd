"""The traced numbers of layers: which mode counts, and what adapters on some linear layers keep less."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Attention, Checkpointing, Compute, MasterWeights, PeftMethod, Strategy
from tunebook.config.compose import compose
from tunebook.config.schema import FsdpConfig, ParallelismConfig
from tunebook.model.parameters import count_parameters
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.kept import inputs_of_layers, kept_by_layers, kept_by_one_layer
from tunebook.plan.memory.states import FOUR_BIT_BYTES
from tunebook.plan.memory.work import kept_on_device

from .layers import measured

# Bytes of all 24 layers: whatever the length, per token, per token and token of its row; the same of the largest layer.
SAVED = {
    "fp32/full/sdpa": [0, 50, 8, 0, 5, 1],
    "autocast/full/flash": [1000, 30, 0, 100, 3, 0],
    "autocast/full/sdpa": [0, 30, 4, 0, 3, 1],
    "autocast/adapter/eager": [0, 20, 6, 0, 2, 1],
    "bf16/full/flash": [0, 10, 0, 0, 1, 0],
}


@pytest.fixture
def unusual(sound):
    """The sound configuration with layers that were measured; one row of 2,048 tokens."""
    sound.model.facts.measured = measured(
        num_layers=24, parameters=240_000_000, linear_inputs=700, adapter_parameters=90_000, saved=SAVED
    )
    return sound


def kept(config):
    return kept_by_layers(config, config.model.facts)


ROW, HIDDEN = 2048, 896


def test_each_mode_has_its_numbers(unusual):
    assert kept(unusual) == 1000 + 30 * ROW
    unusual.precision.master_weights = MasterWeights.bf16
    assert kept(unusual) == 10 * ROW
    unusual.precision.master_weights = MasterWeights.fp32
    unusual.attention.implementation = Attention.sdpa
    assert kept(unusual) == (30 + 4 * ROW) * ROW
    unusual.training.micro_batch_size = 3
    assert kept(unusual) == 3 * (30 + 4 * 3 * ROW) * ROW  # put one behind the other, as one row


def test_a_recomputed_layer_is_the_largest_and_every_layer_keeps_its_input(unusual):
    facts = unusual.model.facts
    assert inputs_of_layers(unusual, facts) == 24 * ROW * 4 * HIDDEN
    assert kept_by_one_layer(unusual, facts) == 100 + 3 * ROW


def test_dropout_looks_at_the_inputs_of_every_linear_layer(unusual):
    unusual.attention.implementation, unusual.peft.method = Attention.eager, PeftMethod.lora
    assert kept(unusual) == (20 + 6 * ROW) * ROW + 700 * ROW
    unusual.peft.dropout = 0.0
    assert kept(unusual) == (20 + 6 * ROW) * ROW


def test_a_mask_in_fp32_keeps_no_scores(unusual):
    """A row of 2,287 tokens took no more on an H200 than one of 2,288, which any of sdpa's kernels can take."""
    unusual.attention.implementation, unusual.precision.compute = Attention.sdpa, Compute.fp32
    assert kept(unusual) == (50 + 8 * ROW) * ROW


def test_a_mode_that_was_not_traced_is_as_the_most_similar_one(unusual):
    unusual.precision.compute = Compute.fp32  # with flash attention
    assert kept(unusual) == (50 + 8 * ROW) * ROW
    unusual.precision.compute, unusual.attention.implementation = Compute.bf16, Attention.eager
    assert kept(unusual) == 1000 + 30 * ROW


def test_parameters_are_those_that_were_counted(unusual):
    facts = unusual.model.facts
    facts.measured.adapters = {"q_proj": [24 * 1000, 24 * 2750]}
    assert count_parameters(unusual, facts).layers == 240_000_000
    unusual.peft.method, unusual.peft.rank = PeftMethod.lora, 8
    assert count_parameters(unusual, facts).trained == 8 * 90_000
    facts.num_layers = 12  # a model that a run cuts in half
    assert count_parameters(unusual, facts).layers == 120_000_000
    assert count_parameters(unusual, facts).trained == 8 * 45_000
    unusual.peft.method = PeftMethod.full
    assert kept(unusual) == (1000 + 30 * ROW) / 2


def test_dolly_has_the_layers_of_gpt_neox():
    """Sizes by hand; what its layers keep was found on the meta device."""
    words = ["model=dolly_v2_3b", "dataset=synthetic", "training.global_samples=16", "training.max_length=2048"]
    config = compose(None, [*words, "optimizer.learning_rate=1e-4", "hardware=hopper", "precision=bf16"]).config
    config.hardware.gpus_per_node, config.activation.checkpointing = 1, Checkpointing.disabled
    config.attention.implementation, config.packing.row_length = Attention.flash_attention_2, 2048
    facts = config.model.facts
    assert facts.measured.num_layers == facts.num_layers
    assert facts.measured.parameters == 32 * (12 * 2560**2 + 13 * 2560)  # four products with biases, two norms
    assert facts.num_parameters == facts.measured.parameters + 2 * 50_280 * 2560 + 2 * 2560
    assert facts.measured.adapter_parameters == 32 * (2 * 2560 + 4 * 2560 + 5 * 2560 + 5 * 2560)
    assert sum(map(sum, facts.measured.adapters.values())) == facts.measured.adapter_parameters
    assert sum(inputs for inputs, _ in facts.measured.adapters.values()) == facts.measured.linear_inputs
    assert kept(config) == 2048 * 2_953_728
    assert estimate_memory(config, facts).weights_gib == pytest.approx(4 * 2_775_086_080 / GIB)


def test_only_linear_layers_are_quantized(unusual):
    """transformers 5 keeps the experts of a layer in one tensor, which bitsandbytes leaves as it is."""
    unusual.peft.method = PeftMethod.qlora
    facts = unusual.model.facts
    assert count_parameters(unusual, facts).linear == 240_000_000
    whole = estimate_memory(unusual, facts).weights_gib
    facts.measured.linear_parameters = 40_000_000
    assert count_parameters(unusual, facts).linear == 40_000_000
    more = 200_000_000 * (4 - FOUR_BIT_BYTES) / GIB
    assert estimate_memory(unusual, facts).weights_gib - whole == pytest.approx(more)


# Of 36 layers of Qwen3-8B: 4,096 hidden numbers, 1,024 of keys and of values, 12,288 inner ones.
QWEN3_ADAPTERS = {
    name: [36 * inputs, 36 * outputs]
    for name, inputs, outputs in (
        ("q_proj", 4096, 4096),
        ("k_proj", 4096, 1024),
        ("v_proj", 4096, 1024),
        ("o_proj", 4096, 4096),
        ("gate_proj", 4096, 12_288),
        ("up_proj", 4096, 12_288),
        ("down_proj", 12_288, 4096),
    )
}


@pytest.fixture
def qwen3(sound):
    """LoRA of rank 128 without dropout on layers with the sizes of Qwen3-8B's, known by name."""
    facts = sound.model.facts
    facts.num_layers, facts.hidden_size, facts.intermediate_size, facts.vocab_size = 36, 4096, 12_288, 151_936
    facts.measured = measured(
        num_layers=36, parameters=1, linear_inputs=36 * (6 * 4096 + 12_288), adapters=QWEN3_ADAPTERS,
        adapter_parameters=sum(map(sum, QWEN3_ADAPTERS.values())), saved=ADAPTER_SAVED,
    )  # fmt: skip
    sound.peft.method, sound.peft.rank, sound.peft.dropout = PeftMethod.lora, 128, 0.0
    sound.precision.master_weights = MasterWeights.bf16
    return sound


ADAPTER_SAVED = {
    "fp32/adapter/flash": [0, 36 * 900_000, 0, 0, 900_000, 0],
    "bf16/adapter/flash": [0, 36 * 400_000, 0, 0, 400_000, 0],
    "bf16/adapter/compiled": [0, 36 * 200_000, 0, 0, 200_000, 0],
    "bf16/dropout/compiled": [0, 36 * 300_000, 0, 0, 300_000, 0],
}


def trained_of(config):
    return count_parameters(config, config.model.facts).trained


def test_adapters_are_counted_where_they_are_put(qwen3):
    """By hand: 61.3 million on query and value, where all seven products have 349.2 million."""
    assert trained_of(qwen3) == 128 * 36 * (6 * 4096 + 12_288 + 2 * 4096 + 2 * 1024 + 2 * 12_288 + 4096) == 349_175_808
    qwen3.peft.target_modules = ["q_proj", "v_proj"]
    assert trained_of(qwen3) == 36 * 128 * (4096 + 4096 + 4096 + 1024) == 61_341_696
    qwen3.peft.target_modules = ["model.layers.0.self_attn.q_proj", "elsewhere"]  # PEFT passes over the second
    assert trained_of(qwen3) == 36 * 128 * 2 * 4096
    qwen3.model.facts.num_layers = 18  # a model that a run cuts in half
    assert trained_of(qwen3) == 18 * 128 * 2 * 4096
    qwen3.peft.target_modules = ["q_proj", "embed_tokens", "lm_head"]
    assert trained_of(qwen3) == 128 * (18 * 2 * 4096 + 2 * (151_936 + 4096))
    qwen3.peft.target_modules = ["elsewhere"]
    assert trained_of(qwen3) == 349_175_808 / 2


def test_a_product_that_is_saved_whole_has_no_adapter_where_names_are_known(qwen3):
    everywhere, saved = trained_of(qwen3), 4096 * 12_288
    qwen3.model.facts.measured.parameters = 36 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * saved)  # as Llama has them
    qwen3.model.facts.num_attention_heads, qwen3.model.facts.num_key_value_heads = 32, 8
    qwen3.peft.modules_to_save = ["down_proj"]
    assert trained_of(qwen3) == everywhere - 128 * 36 * (4096 + 12_288) + 36 * saved


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [  # numbers of two bytes that are not kept for each token and layer, with adapters on query and value alone
        ({}, 4 * 4096 + 12_288),  # a copy for each of the others: key, output, gate, up; down
        ({"model.compile_layers": True}, 2 * 4096 + 12_288),  # gate and up share one, key's is query's, too
        ({"precision.compute": "fp32"}, 2 * (4096 + 12_288)),  # that before the output product is the attention's own
    ],
    ids=["16 bits", "compiled", "fp32"],
)
def test_inputs_of_products_without_an_adapter_are_not_kept(qwen3, changed, changes, numbers):
    qwen3.attention.implementation = Attention.varlen_attention
    config = changed(qwen3, changes)
    before = kept(config)
    config.peft.target_modules = ["q_proj", "v_proj"]
    assert before - kept(config) == 36 * ROW * 2 * numbers


def test_without_autocast_inputs_are_handed_on_as_they_are(qwen3):
    """By hand, of a token and layer: FSDP has none over weights in bf16, and gathers adapters so; DDP has it."""
    qwen3.hardware.gpus_per_node, qwen3.parallelism = 2, FsdpConfig(strategy=Strategy.fsdp)
    everywhere = kept(qwen3)
    assert everywhere < 36 * ROW * 400_000, "where nobody has looked without, what is known under autocast, with less"
    qwen3.model.facts.measured.saved_without_autocast = {"cast/adapter/flash": [0, 36 * 350_000, 0, 0, 350_000, 0]}
    assert kept(qwen3) == 36 * ROW * 350_000
    qwen3.peft.target_modules = ["q_proj", "v_proj"]  # key's input is theirs; output's is kept by the kernel
    assert kept(qwen3) == 36 * ROW * (350_000 - 2 * (4096 + 12_288))
    qwen3.peft.dropout = 0.05  # of each input a mask, and what it leaves, once more for the second that reads it
    assert kept(qwen3) == 36 * ROW * (350_000 - 2 * (4096 + 12_288) + 2 * 4096 + 2 * 4096)
    qwen3.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    qwen3.peft.target_modules, qwen3.peft.dropout = [], 0.0
    assert kept(qwen3) == 36 * ROW * 400_000


@pytest.mark.parametrize(("dropout", "left"), [(0.0, 41_000), (0.05, 28_000)])
def test_offloading_leaves_an_input_that_several_adapters_save_and_dropout_gives_each_its_own(qwen3, dropout, left):
    """Of what is saved again while it is on its way a copy stays. 2560 tokens of Qwen3-1.7B with dropout, two H200."""
    qwen3.hardware.gpus_per_node, qwen3.parallelism = 2, FsdpConfig(strategy=Strategy.fsdp)
    qwen3.activation.offload, qwen3.peft.dropout = True, dropout
    measured = qwen3.model.facts.measured
    measured.saved["bf16/adapter/flash/offloaded"] = [0, 36 * 28_000, 0, 0, 28_000, 0]
    measured.saved_without_autocast = {
        "cast/adapter/flash": [0, 36 * 350_000, 0, 0, 350_000, 0],
        "cast/adapter/flash/offloaded": [0, 36 * 41_000, 0, 0, 41_000, 0],
    }
    on_their_way = 8 * ROW * 4096
    assert kept_on_device(qwen3, qwen3.model.facts) == 36 * ROW * left + on_their_way


def test_inputs_of_fused_products_are_known_by_their_names(qwen3):
    """Phi-3's: its query, key and value are one product, as are gate and up."""
    facts = qwen3.model.facts
    facts.measured.adapters = {
        "qkv_proj": [36 * 4096, 36 * 6144], "o_proj": [36 * 4096] * 2, "gate_up_proj": [36 * 4096, 36 * 24_576],
        "down_proj": [36 * 12_288, 36 * 4096],
    }  # fmt: skip
    facts.measured.linear_inputs = 36 * (3 * 4096 + 12_288)
    before = kept(qwen3)
    qwen3.peft.target_modules = ["qkv_proj"]
    assert before - kept(qwen3) == 36 * ROW * 2 * (2 * 4096 + 12_288)
    qwen3.peft.target_modules = ["q_proj", "o_proj"]  # there is no q_proj, and PEFT passes over it
    assert before - kept(qwen3) == 36 * ROW * 2 * (2 * 4096 + 12_288)
    qwen3.peft.target_modules = ["q_proj", "k_proj"]  # PEFT refuses it
    assert before == kept(qwen3)
    qwen3.peft.target_modules = ["qkv_proj"]
    qwen3.peft.dropout = 0.05
    assert before - kept(qwen3) == 36 * ROW * (2 * (2 * 4096 + 12_288) - 4096)
    qwen3.attention.implementation, qwen3.model.compile_layers = Attention.varlen_attention, True
    without = kept(qwen3)
    qwen3.peft.target_modules = []
    more = 2 * 2 * 4096 + 12_288 + 2 * (2 * 4096 + 12_288)  # what a dropout has looked at, and inputs
    assert kept(qwen3) - without == pytest.approx(36 * ROW * more)


@pytest.mark.parametrize(
    ("names", "each"),
    [
        ([], 400_000),
        (["w1", "w2", "w3"], 400_000 - 2 * 4 * 4096),
        (["q_proj", "w1", "w2", "w3"], 400_000 - 2 * 3 * 4096),
        (["q_proj", "k_proj", "v_proj", "o_proj"], 100_000),
        (["q_proj", "gate"], 100_000 - 2 * 3 * 4096),  # the router is small beside the experts
        (["elsewhere"], 400_000),
    ],
    ids=lambda value: "-".join(value) or "all" if isinstance(value, list) else "",
)
def test_what_experts_keep_for_their_adapters_is_not_there_without_them(qwen3, names, each):
    measured = qwen3.model.facts.measured
    measured.adapters = {name: QWEN3_ADAPTERS[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    measured.expert_adapters = {name: [36, 36] for name in ("gate", "w1", "w2", "w3")}
    measured.saved_beside_experts = {"bf16/adapter/flash": [0, 36 * 100_000, 0, 0, 100_000, 0]}
    qwen3.peft.target_modules = names
    assert kept(qwen3) == 36 * ROW * each
    qwen3.peft.method = PeftMethod.full
    measured.saved = SAVED
    assert kept(qwen3) == 10 * ROW, "adapters are of no account"
