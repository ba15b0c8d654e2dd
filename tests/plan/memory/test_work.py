"""What is at work in a layer and what offloading leaves, against the tensors that live in both passes of a Llama."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    MasterWeights,
    MixedPrecision,
    PeftMethod,
    Strategy,
)
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.plan.memory import work
from tunebook.plan.memory.kept import inputs_of_layers, kept_by_layers, kept_by_one_layer, mask_bytes
from tunebook.plan.memory.ledger import Moment
from tunebook.plan.memory.rows import step_ledger
from tunebook.plan.memory.work import NORM_AFTER_INNER, backward_work, forward_work, kept_on_device

from .layers import measured
from .live_tensors import (
    ATTENTION,
    LAST,
    NUM_HEADS,
    NUM_LAYERS,
    SMALL,
    TOKENS,
    Way,
    bytes_of_pairs,
    growth_of,
    kept_growth_of,
    most_alive,
    saved_by_a_layer,
    set_formats,
)

ROW, HIDDEN, INNER, LAYERS = 2048, 896, 4864, 24  # of the sound configuration
BF16 = torch.bfloat16
SINGLE = ParallelismConfig(strategy=Strategy.single)
FSDP = FsdpConfig(strategy=Strategy.fsdp)  # whose adapters are in bf16, as the rest
CAST = ZeroConfig(strategy=Strategy.zero2, mixed_precision=MixedPrecision.cast)
LORA = Way(is_adapter=True)
WAYS = {
    "full": (Way(), SINGLE),
    "full in fp32": (Way(is_mixed=False), SINGLE),
    "adapter": (LORA, SINGLE),
    "adapter, dropout": (replace(LORA, dropout=0.05), SINGLE),
    "adapter, bf16": (replace(LORA, weights=BF16), SINGLE),
    "adapter, bf16, dropout": (replace(LORA, weights=BF16, dropout=0.05), SINGLE),
    "adapter in bf16": (replace(LORA, weights=BF16, adapters=BF16), FSDP),
    "adapter in bf16, dropout": (replace(LORA, weights=BF16, adapters=BF16, dropout=0.05), FSDP),
    "adapter, cast": (replace(LORA, weights=BF16, adapters=BF16, is_mixed=False), CAST),
    "adapter, cast, dropout": (replace(LORA, weights=BF16, adapters=BF16, is_mixed=False, dropout=0.05), CAST),
    "adapter on attention": (replace(LORA, targets=ATTENTION), SINGLE),
    "adapter on attention, bf16, dropout": (replace(LORA, targets=ATTENTION, weights=BF16, dropout=0.05), SINGLE),
}
IN_FP32 = {
    "adapter in fp32": (replace(LORA, is_mixed=False), SINGLE),
    "adapter in fp32, dropout": (replace(LORA, is_mixed=False, dropout=0.05), SINGLE),
}


def set_to(config, way, parallelism):
    """The configuration of the layers that are followed."""
    config.parallelism = parallelism
    set_formats(config, way)
    config.peft.dropout, config.peft.target_modules = way.dropout, list(way.targets)


def of_numbers(count, config):
    """How many bytes of a token each hidden and each inner number adds to what `count` says, in groups of one head."""
    narrow = replace(config.model.facts, num_key_value_heads=14)
    wide = replace(narrow, hidden_size=2 * HIDDEN, num_attention_heads=28, num_key_value_heads=28)
    wide_inner = replace(narrow, intermediate_size=2 * INNER)
    hidden, inner = count(config, wide) - count(config, narrow), count(config, wide_inner) - count(config, narrow)
    return hidden / ROW / HIDDEN, inner / ROW / INNER


def at_work(config, facts):
    """What a layer that is computed again needs in addition to what it keeps."""
    return backward_work(config, facts) - kept_by_one_layer(config, facts)


# Each way is followed in the one test or the other each time, and in both at night.
IN_THE_FORWARD_PASS = {"full", "adapter, dropout", "adapter, bf16", "adapter in bf16, dropout", "adapter, cast",
                       "adapter in fp32"}  # fmt: skip


def followed(name, is_recomputed, *expected):
    """The case of a way, and when it is followed."""
    is_each_time = (name in IN_THE_FORWARD_PASS) != is_recomputed
    return pytest.param(name, *expected, marks=[] if is_each_time else pytest.mark.nightly)


@pytest.mark.parametrize("name", [followed(name, True) for name in (*WAYS, *IN_FP32, "full in bf16", "inner adapters")])
def test_a_layer_that_is_computed_again_has_at_work_what_was_followed(sound, name):
    """In the last layer's backward pass: all tensors but what goes into the layers, and what the test itself holds.

    That is their output, its gradient, and what positions are turned by. Of adapters with dropout in fp32 a byte is
    counted that was not there.
    """
    others = {
        "full in bf16": (Way(weights=BF16), SINGLE),
        "inner adapters": (replace(LORA, targets=("gate_proj", "up_proj", "down_proj")), SINGLE),
    }
    way, parallelism = (WAYS | IN_FP32 | others)[name]
    set_to(sound, way, parallelism)
    stream = 2 if way.weights is BF16 else 4
    alive = growth_of(replace(way, is_recomputed=True))[f"backward {LAST}"]
    kept = kept_growth_of(way)
    sound.activation.checkpointing = Checkpointing.enabled
    hidden, inner = of_numbers(at_work, sound)
    assert hidden + kept.hidden == alive.hidden - stream * (NUM_LAYERS + 2) - stream / 8
    assert inner + kept.inner == alive.inner + (1 if name == "adapter in fp32, dropout" else 0)


def in_tiles(names, *tiles):
    """Each way in tiles of one of the sizes each time, and of all of them at night."""
    here = [name for name in names if name not in IN_THE_FORWARD_PASS]
    each_time = [(name, tiles[place % len(tiles)]) for place, name in enumerate(here)]
    others = [case for case in product(names, tiles) if case not in each_time]
    return [*each_time, *(pytest.param(*case, marks=pytest.mark.nightly) for case in others)]


@pytest.mark.parametrize(("name", "tile"), in_tiles([*WAYS, *IN_FP32, "full in bf16"], 640, 2560))
def test_of_an_mlp_in_tiles_one_tile_is_at_work(sound, name, tile):
    tokens = 5120
    way, parallelism = (WAYS | IN_FP32 | {"full in bf16": (Way(weights=BF16), SINGLE)})[name]
    set_to(sound, way, parallelism)
    way = replace(way, is_recomputed=True, tile_tokens=tile)
    whole, tiled = (round(number) for number in saved_by_a_layer(way))
    is_narrow = way.is_mixed or way.weights is BF16
    assert whole - tiled > 0.8 * (6 if is_narrow else 12) * SMALL[1]
    modes = [
        f"{each}/{method}/flash" for each in ("fp32", "autocast", "bf16", "cast") for method in ("full", "adapter")
    ]
    numbers = {
        key: [0, 3 * each, 0, 0, each, 0] for mode in modes for key, each in ((mode, whole), (f"{mode}/tiled", tiled))
    }
    facts = replace(
        sound.model.facts, hidden_size=SMALL[0], intermediate_size=SMALL[1], measured=measured(saved=numbers)
    )
    sound.activation.checkpointing, sound.activation.mlp_tile_tokens = Checkpointing.enabled, tile
    sound.packing.row_length = tokens
    assert kept_by_one_layer(sound, facts) == pytest.approx(tokens * tiled, rel=1e-3)
    assert backward_work(sound, facts) == pytest.approx(most_alive(way, tokens), rel=0.08)


def test_a_row_of_one_tile_is_not_tiled(sound):
    sound.activation.checkpointing, sound.activation.mlp_tile_tokens = Checkpointing.enabled, ROW
    in_one = backward_work(sound, sound.model.facts)
    sound.activation.mlp_tile_tokens = ROW // 8
    in_eight = backward_work(sound, sound.model.facts)
    sound.activation.mlp_tile_tokens = None
    assert in_one == backward_work(sound, sound.model.facts) > in_eight


@pytest.mark.parametrize(
    "way", [Way(is_mixed=False), Way(), Way(weights=BF16), replace(LORA, targets=ATTENTION)], ids=str
)
@pytest.mark.parametrize("is_recomputed", [True, False])
def test_attention_without_a_kernel_has_the_gradient_of_its_softmax_at_work(sound, way, is_recomputed):
    """As followed, and 4 bytes more: the product in CUDA's kernel, by a run's peak on an H100 (h100_held_out)."""
    set_to(sound, way, SINGLE)
    sound.attention.implementation = Attention.eager
    sound.activation.checkpointing = Checkpointing.enabled if is_recomputed else Checkpointing.disabled

    def planned(row):
        sound.packing.row_length = row
        if is_recomputed:
            return backward_work(sound, facts)
        return kept_on_device(sound, facts) + backward_work(sound, facts)

    facts = replace(sound.model.facts, num_layers=NUM_LAYERS)
    row = 65_536  # the squares are most of it
    squares = (planned(2 * row) - 2 * planned(row)) / 2 / row**2 / facts.num_attention_heads
    followed = bytes_of_pairs(replace(way, is_recomputed=is_recomputed))
    assert squares == pytest.approx(followed + 4, rel=0.06)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        followed("full", False, 0),
        followed("full in fp32", False, 0),
        followed("adapter", False, 6),  # in fp32, and once more in bf16
        followed("adapter, dropout", False, 10),  # and what dropout made of it
        followed("adapter, bf16", False, 6),
        followed("adapter, bf16, dropout", False, 10),
        followed("adapter in bf16", False, 2),
        followed("adapter in bf16, dropout", False, 2),
        followed("adapter, cast", False, 2),
        followed("adapter, cast, dropout", False, 2),
        followed("adapter in fp32", False, 4),
        followed("adapter in fp32, dropout", False, 4),
    ],
)
def test_the_last_layers_forward_pass_has_more_at_work_than_it_keeps(sound, name, expected):
    way, parallelism = (WAYS | IN_FP32)[name]
    set_to(sound, way, parallelism)
    growth = growth_of(way)
    assert growth[f"forward {LAST}"].inner - growth["kept"].inner == expected
    assert forward_work(sound, sound.model.facts) == ROW * INNER * expected


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (Way(is_mixed=False), 20),
        (Way(), 10),
        (Way(weights=BF16), 14),
        (LORA, 8),
        (replace(LORA, dropout=0.05), 8),
        (replace(LORA, weights=BF16), 8),
        (replace(LORA, weights=BF16, dropout=0.05), 8),
        (replace(LORA, targets=ATTENTION), 8),
        (replace(LORA, is_mixed=False), 20),
        (replace(LORA, is_mixed=False, dropout=0.05), 8),
    ],
)
def test_offloading_leaves_what_is_saved_a_second_time_on_its_way(sound, way, expected):
    """Bytes of each token and hidden number; the logarithms' sums and a scale per norm are not counted."""
    _, left = saved_by_a_layer(way)
    assert left / SMALL[0] == pytest.approx(expected, rel=0.01)
    set_to(sound, way, SINGLE)
    sound.activation.offload = True
    on_their_way = 8
    counted = kept_on_device(sound, sound.model.facts)
    assert counted == ROW * HIDDEN * (LAYERS * expected + on_their_way)


@pytest.mark.parametrize(
    ("way", "expected", "of_softmax"),
    [
        (Way(is_mixed=False), 16, 4),
        (Way(), 8, 0),
        (Way(weights=BF16), 12, 0),
        (LORA, 8, 0),
        (replace(LORA, weights=BF16), 8, 0),
        (replace(LORA, is_mixed=False), 16, 4),
        (replace(LORA, is_mixed=False, dropout=0.05), 8, 4),
    ],
)
def test_offloading_leaves_the_softmax_of_eager_attention_in_fp32(sound, way, expected, of_softmax):
    """The product with the values keeps it once more; nothing keeps what comes of that a second time."""
    facts = sound.model.facts
    _, left = saved_by_a_layer(way, is_eager=True)
    assert left == pytest.approx(SMALL[0] * expected + of_softmax * NUM_HEADS * TOKENS, rel=0.01)
    set_to(sound, way, SINGLE)
    sound.activation.offload, sound.attention.implementation = True, Attention.eager
    counted = kept_on_device(sound, facts) - mask_bytes(sound)
    each = HIDDEN * expected + of_softmax * facts.num_attention_heads * ROW
    assert counted == ROW * (LAYERS * each + 8 * HIDDEN)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (Way(), 10 + 8),  # two norms' outputs, in fp32
        (LORA, 8 + 8),
        (replace(LORA, weights=BF16), 8 + 4),
        (Way(weights=BF16), 14),
        (Way(is_mixed=False), 20),
        (replace(LORA, is_mixed=False), 20),
    ],
)
def test_zero_3_leaves_what_norms_give_to_several_products(sound, way, expected):
    set_to(sound, way, ZeroConfig(strategy=Strategy.zero3))
    sound.activation.offload = True
    counted = kept_on_device(sound, sound.model.facts)
    assert counted == ROW * HIDDEN * (LAYERS * expected + 8)


def test_offloading_leaves_of_measured_layers_what_was_measured(sound):
    """Of half of them, since as many are planned with."""
    facts = sound.model.facts
    saved = {"autocast/full/flash": [0, 9_000_000, 0, 0, 1, 0], "autocast/full/flash/offloaded": [70, 60, 0, 0, 1, 0]}
    facts.measured = measured(num_layers=2 * LAYERS, parameters=1, linear_inputs=1, adapter_parameters=1, saved=saved)
    sound.activation.offload = True
    assert kept_on_device(sound, facts) == (70 + 60 * ROW) / 2 + 8 * ROW * HIDDEN
    sound.parallelism = ZeroConfig(strategy=Strategy.zero3)
    under_zero3 = 8 * ROW * LAYERS * HIDDEN
    assert kept_on_device(sound, facts) == (70 + 60 * ROW) / 2 + 8 * ROW * HIDDEN + under_zero3


def test_offloading_leaves_what_was_measured_beside_experts_where_no_adapter_is_on_them(sound):
    facts, modes = sound.model.facts, ("autocast/adapter/flash", "autocast/adapter/flash/offloaded")
    everywhere, beside = ({mode: [0, each, 0, 0, 1, 0] for mode in modes} for each in (90_000, 60_000))
    facts.measured = measured(
        num_layers=LAYERS, parameters=1, linear_inputs=1, adapter_parameters=1, saved=everywhere,
        adapters={"q_proj": [0, 1]}, expert_adapters={"w1": [1, 1]}, saved_beside_experts=beside,
    )  # fmt: skip
    sound.activation.offload, sound.peft.method, sound.peft.dropout = True, PeftMethod.lora, 0.0
    assert kept_on_device(sound, facts) == 90_000 * ROW
    sound.peft.target_modules = ["q_proj"]
    assert kept_on_device(sound, facts) == 60_000 * ROW


def few(facts):
    """Layers that keep 100 bytes of a token, of which offloading leaves 90."""
    saved = {"autocast/full/flash": [0, 100, 0, 0, 100, 0], "autocast/full/flash/offloaded": [0, 90, 0, 0, 90, 0]}
    return replace(facts, num_layers=1, measured=measured(saved=saved))


def test_offloading_leaves_no_more_than_is_kept(sound):
    sound.activation.offload = True
    assert kept_on_device(sound, few(sound.model.facts)) == 100 * ROW < (90 + 8 * HIDDEN) * ROW


def test_what_is_kept_without_offloading_and_of_layers_that_are_computed_again(sound):
    facts, inputs = sound.model.facts, ROW * LAYERS * 4 * HIDDEN
    sound.activation.checkpointing = Checkpointing.enabled
    assert kept_on_device(sound, facts) == inputs
    sound.activation.checkpointing = Checkpointing.disabled
    assert kept_on_device(sound, facts) == kept_by_layers(sound, facts)
    sound.activation.offload = True
    sound.activation.checkpointing = Checkpointing.enabled
    assert kept_on_device(sound, facts) == inputs / LAYERS * 6  # those that are being copied
    facts.num_layers = 5
    assert kept_on_device(sound, facts) == inputs / LAYERS * 5


@pytest.mark.parametrize(("method", "num_inputs"), [(PeftMethod.full, 1), (PeftMethod.lora, 2)])
def test_offloading_brings_one_input_back_and_adapters_hold_the_output_of_the_embeddings(sound, method, num_inputs):
    """As traced with TRL's own offloading of four recomputed layers of a small Llama, with and without adapters."""
    sound.peft.method, sound.activation.offload = method, True
    sound.activation.checkpointing = Checkpointing.enabled
    ledger = step_ledger(sound, sound.model.facts, accumulates=False)
    one = inputs_of_layers(sound, sound.model.facts) / LAYERS
    there = {moment: [row.num_bytes for row in ledger.at(moment) if "inputs" in row.label] for moment in Moment}
    assert there[Moment.forward] == there[Moment.reduce] == [6 * one]
    assert there[Moment.last] == there[Moment.middle] == [num_inputs * one]
    assert not there[Moment.first]


@pytest.mark.parametrize(("method", "each"), [(PeftMethod.full, 12), (PeftMethod.lora, 8)])
def test_what_is_computed_once_for_all_layers_is_kept_beside_them(sound, method, each):
    """Gemma 4's inputs of each layer, as autograd saves them in fp32: by their norm, and for the layers."""
    sizes = {"num_hidden_layers": 3, "hidden_size_per_layer_input": 24, "vocab_size": 64, "hidden_size": 40}
    sizes |= {"vocab_size_per_layer_input": 64, "intermediate_size": 56, "num_attention_heads": 2, "head_dim": 16}
    config = Gemma4TextConfig(**sizes, num_key_value_heads=2, global_head_dim=16, pad_token_id=0)
    model, found = AutoModelForCausalLM.from_config(config), {}
    if method is not PeftMethod.full:
        model.requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_()
    keep = lambda tensor: found.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage()) and tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(11)[None], use_cache=False)
    of_all_layers = 11 * 3 * 24 * 4
    assert sum(of_all_layers for storage in found.values() if storage.nbytes() == of_all_layers) == 11 * 3 * 24 * each
    facts = few(sound.model.facts)
    before = kept_on_device(sound, facts)
    sound.peft.method, sound.peft.dropout = method, 0.0
    before = kept_on_device(sound, facts)
    facts.measured.per_layer_inputs = 72
    assert kept_on_device(sound, facts) - before == ROW * 72 * each


@pytest.mark.parametrize(
    ("way", "parallelism", "hidden", "inner"),
    [
        (Way(), SINGLE, 8, 10),
        (Way(is_mixed=False), SINGLE, 8, 20),
        (LORA, SINGLE, 8, 12),
        (replace(LORA, dropout=0.05), SINGLE, 8, 17),
        (replace(LORA, dropout=0.05, weights=BF16), FSDP, 8, 10),
        (replace(LORA, dropout=0.05, targets=ATTENTION), SINGLE, 8, 10),
    ],
)
def test_of_what_is_offloaded_the_last_layer_is_still_there(sound, way, parallelism, hidden, inner):
    set_to(sound, way, parallelism)
    sound.activation.offload = True
    assert forward_work(sound, sound.model.facts) == ROW * (hidden * HIDDEN + inner * INNER)
    assert backward_work(sound, sound.model.facts) == 0


def test_no_more_is_being_copied_than_two_layers_save(sound):
    sound.activation.offload = True
    assert forward_work(sound, few(sound.model.facts)) == 2 * 100 * ROW


@pytest.mark.parametrize(
    ("way", "parallelism", "hidden", "inner"),
    [
        (Way(), SINGLE, 0, 2),
        (Way(weights=BF16), SINGLE, 0, 2),
        (Way(is_mixed=False), SINGLE, 0, 4),
        (LORA, SINGLE, 6, 4),  # in fp32
        (replace(LORA, dropout=0.05), SINGLE, 6, 4),
        (replace(LORA, is_mixed=False), SINGLE, 0, 4),
        (replace(LORA, weights=BF16), FSDP, 0, 2),
        (replace(LORA, weights=BF16), CAST, 0, 2),
        (replace(LORA, targets=ATTENTION), SINGLE, 0, 2),
    ],
)
def test_the_last_layers_backward_pass_begins_with_gradients_of_its_inner_numbers(
    sound, way, parallelism, hidden, inner
):
    set_to(sound, way, parallelism)
    assert backward_work(sound, sound.model.facts) == ROW * (hidden * HIDDEN + inner * INNER)


@pytest.mark.parametrize("weights", [MasterWeights.fp32, MasterWeights.bf16], ids=lambda weights: weights.name)
@pytest.mark.parametrize(
    ("targets", "dropout", "inner"),
    [
        ((), 0.0, 10),
        ((), 0.05, 8),
        (("gate_proj", "up_proj", "down_proj"), 0.0, 10),
        (("gate_proj", "up_proj"), 0.05, 10),
        (("gate_proj",), 0.0, 8),
        (("v_proj", "up_proj"), 0.0, 6),
        (("down_proj",), 0.0, 4),
        (("down_proj",), 0.05, 2),
        (ATTENTION, 0.05, 4),
    ],
    ids=str,
)
def test_compiled_layers_have_at_work_what_adapters_read_and_give(sound, weights, targets, dropout, inner):
    """By the measured peaks."""
    facts = sound.model.facts
    sound.model.compile_layers, sound.peft.method, sound.precision.master_weights = True, PeftMethod.lora, weights
    sound.peft.dropout, sound.peft.target_modules = dropout, list(targets)
    at_work = ROW * inner * INNER
    assert (forward_work(sound, facts), backward_work(sound, facts)) == (0, at_work)
    layer, hidden = kept_by_one_layer(sound, facts), 4 if weights is MasterWeights.bf16 else 0
    sound.activation.checkpointing = Checkpointing.enabled
    assert backward_work(sound, facts) == pytest.approx(layer + at_work + ROW * hidden * HIDDEN)
    sound.activation.checkpointing = Checkpointing.selective
    assert backward_work(sound, facts) == at_work
    sound.peft.method = PeftMethod.full
    stream = 2 if weights is MasterWeights.bf16 else 4
    assert backward_work(sound, facts) == ROW * (stream * HIDDEN + 8 * INNER), "the product and three gradients"
    sound.activation.checkpointing = Checkpointing.disabled
    assert backward_work(sound, facts) == 0


def test_of_a_fused_product_both_halves_are_at_work(sound):
    """Phi-3's; of GPT-NeoX nothing but what a frozen one has."""
    facts = sound.model.facts
    sound.model.compile_layers, sound.peft.method, sound.peft.dropout = True, PeftMethod.lora, 0.0
    for names, inner in ((("qkv_proj", "gate_up_proj", "down_proj"), 10), (("query_key_value", "dense_h_to_4h"), 4)):
        adapters = {name: [LAYERS * HIDDEN, LAYERS * INNER] for name in names}
        facts.measured = measured(
            num_layers=LAYERS, parameters=1, linear_inputs=1, adapter_parameters=1, adapters=adapters
        )
        assert backward_work(sound, facts) == ROW * inner * INNER


@pytest.mark.parametrize(("kind", "units"), [("Qwen2ForCausalLM", 3), ("Olmo2ForCausalLM", 1)])
@pytest.mark.parametrize("weights", [MasterWeights.fp32, MasterWeights.bf16], ids=lambda weights: weights.name)
def test_compiled_layers_that_are_computed_again_have_gradients_beside_what_they_keep(sound, weights, kind, units):
    """By recordings of an H100: three of the inner numbers; one where a norm follows them."""
    facts = replace(sound.model.facts, architecture=kind)
    sound.model.compile_layers, sound.precision.master_weights = True, weights
    sound.activation.checkpointing = Checkpointing.enabled
    assert backward_work(sound, facts) - kept_by_one_layer(sound, facts) == ROW * 2 * units * INNER


@pytest.mark.parametrize("kind", ["exaone4", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3"])
def test_architectures_with_a_norm_behind_the_inner_numbers_have_one(kind):
    config = AutoConfig.for_model(kind, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__.startswith(NORM_AFTER_INNER)
    names = [name for name, _ in model.model.layers[0].named_children()]
    assert {"post_feedforward_layernorm", "post_mlp_layernorm"} & {*names}


@pytest.mark.parametrize("weights", [MasterWeights.fp32, MasterWeights.bf16], ids=lambda weights: weights.name)
def test_deepspeed_casts_adapters_over_16_bit_weights_so_that_they_cast_nothing(sound, weights):
    sound.precision.compute, sound.precision.master_weights = Compute.bf16, weights
    sound.peft.method, sound.peft.target_modules = PeftMethod.lora, []
    for parallelism, is_cast in (
        (SINGLE, False),
        (ZeroConfig(strategy=Strategy.zero2), weights is MasterWeights.bf16),
        (CAST, True),
    ):
        sound.parallelism = parallelism
        assert work._casts_mlp_to_fp32(sound) is not is_cast, parallelism
