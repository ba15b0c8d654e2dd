"""Layers that no formula is for: the numbers found on the meta device, and the group file that brings them."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Attention, Checkpointing, Compute, MasterWeights, PeftMethod
from tunebook.config.compose import compose
from tunebook.config.estimate import GIB, estimate_memory
from tunebook.config.estimate.activations import activation_bytes
from tunebook.config.estimate.parameters import count_parameters
from tunebook.config.estimate.states import FOUR_BIT_BYTES
from tunebook.config.model_facts import MeasuredLayers

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
    sound.model.facts.measured = MeasuredLayers(
        num_layers=24, parameters=240_000_000, linear_inputs=700, adapter_parameters=90_000, saved=SAVED
    )
    return sound


def kept(config, **options):
    return activation_bytes(config, config.model.facts, **({"is_recomputed": False} | options))


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
    assert kept(unusual, is_recomputed=True) == 24 * ROW * 4 * HIDDEN + 100 + 3 * ROW


def test_dropout_looks_at_the_inputs_of_every_linear_layer(unusual):
    unusual.attention.implementation, unusual.peft.method = Attention.eager, PeftMethod.lora
    assert kept(unusual) == (20 + 6 * ROW) * ROW + 700 * ROW
    unusual.peft.dropout = 0.0
    assert kept(unusual) == (20 + 6 * ROW) * ROW


def test_a_mask_in_fp32_keeps_no_scores(unusual):
    """A row of 2,287 tokens took no more on an H200 than one of 2,288, which any of sdpa's kernels can take."""
    unusual.attention.implementation, unusual.precision.compute = Attention.sdpa, Compute.fp32
    assert kept(unusual) == (50 + 8 * ROW) * ROW


def test_a_mode_that_could_not_be_measured_goes_by_the_formula(unusual):
    by_formula = dict(SAVED)
    unusual.precision.compute = Compute.fp32
    assert "fp32/full/flash" not in by_formula
    found = kept(unusual)
    unusual.model.facts.measured = None
    assert found == kept(unusual)


def test_parameters_are_those_that_were_counted(unusual):
    facts = unusual.model.facts
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
    assert kept(config) == 2048 * 2_953_728
    assert estimate_memory(config, facts).weights_gib == pytest.approx(4 * 2_775_086_080 / GIB)


def test_only_linear_layers_are_quantised(unusual):
    """transformers 5 keeps the experts of a layer in one tensor, which bitsandbytes leaves as it is."""
    unusual.peft.method = PeftMethod.qlora
    facts = unusual.model.facts
    assert count_parameters(unusual, facts).linear == 240_000_000
    whole = estimate_memory(unusual, facts).weights_gib
    facts.measured.linear_parameters = 40_000_000
    assert count_parameters(unusual, facts).linear == 40_000_000
    more = 200_000_000 * (4 - FOUR_BIT_BYTES) / GIB
    assert estimate_memory(unusual, facts).weights_gib - whole == pytest.approx(more)
