"""What layers of 4-bit weights keep and have at work: bitsandbytes' give their output in the format of their input."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Attention, Checkpointing, Compute, MasterWeights, PeftMethod
from tunebook.plan.memory.kept import four_bit_layers_return_fp32, kept_by_one_layer
from tunebook.plan.memory.work import backward_work

from .live_tensors import ATTENTION

ROW, HIDDEN, INNER = 2048, 896, 4864  # of the sound configuration


def kept_of_a_token(config, facts):
    return kept_by_one_layer(config, facts) / ROW


@pytest.fixture
def quantized(sound):
    sound.peft.method, sound.peft.dropout = PeftMethod.qlora, 0.0
    return sound


def test_gate_its_activation_and_up_are_kept_in_fp32_where_norms_give_that(quantized, changed):
    facts, kept = quantized.model.facts, kept_of_a_token(quantized, quantized.model.facts)
    lora = changed(quantized, {"peft.method": PeftMethod.lora})
    assert kept - kept_of_a_token(lora, facts) == 6 * INNER
    quantized.model.liger_kernel = lora.model.liger_kernel = True  # which computes the activation again
    assert kept_of_a_token(quantized, facts) - kept_of_a_token(lora, facts) == 4 * INNER
    for config in (quantized, lora):
        config.model.compile_layers, config.attention.implementation = True, Attention.varlen_attention
    assert kept_of_a_token(quantized, facts) - kept_of_a_token(lora, facts) == 3 * INNER
    quantized.peft.target_modules = lora.peft.target_modules = list(ATTENTION)
    assert kept_of_a_token(quantized, facts) - kept_of_a_token(lora, facts) == -INNER


@pytest.mark.parametrize(
    ("changes", "spared"),
    [
        # Six inputs of hidden numbers that adapters elsewhere hold for themselves, cast; of two norms the outputs.
        ({"precision.master_weights": MasterWeights.bf16}, 2 * (6 - 2) * HIDDEN),
        ({"precision.master_weights": MasterWeights.bf16, "peft.dropout": 0.05}, 0),  # what it leaves is each one's own
        ({"precision.compute": Compute.fp32}, 0),
    ],
    ids=["bf16", "dropout", "fp32"],
)
def test_other_formats_are_given_back_as_they_are_computed(quantized, changed, changes, spared):
    assert four_bit_layers_return_fp32(quantized)
    quantized = changed(quantized, changes)
    lora = changed(quantized, {"peft.method": PeftMethod.lora})
    facts = quantized.model.facts
    assert not four_bit_layers_return_fp32(quantized) and not four_bit_layers_return_fp32(lora)
    assert kept_of_a_token(lora, facts) - kept_of_a_token(quantized, facts) == spared


def test_beside_4_bits_no_adapter_widens_the_inner_numbers(quantized, changed):
    quantized.precision.master_weights = MasterWeights.bf16
    facts = quantized.model.facts
    assert backward_work(quantized, facts) == ROW * 2 * INNER
    lora = changed(quantized, {"peft.method": PeftMethod.lora})
    assert backward_work(lora, facts) == ROW * (6 * HIDDEN + 4 * INNER)


@pytest.mark.parametrize(("targets", "at_work", "compiled"), [((), 7, 10 + 2 - 3), (ATTENTION, 9, 4 + 1 + 1)], ids=str)
def test_gradients_of_the_inner_numbers_are_in_fp32_too(quantized, targets, at_work, compiled):
    """By the peaks of eight runs on an H200 (benchmarks/results/h200_quantised.jsonl)."""
    facts = quantized.model.facts
    quantized.peft.target_modules = list(targets)
    assert backward_work(quantized, facts) == ROW * (at_work * INNER - 8 * HIDDEN)
    layer = kept_of_a_token(quantized, facts)
    quantized.activation.checkpointing = Checkpointing.enabled
    assert backward_work(quantized, facts) == pytest.approx(ROW * (layer + at_work * INNER + 16 * HIDDEN))
    quantized.activation.checkpointing = Checkpointing.disabled
    quantized.model.compile_layers = True
    assert backward_work(quantized, facts) == ROW * compiled * INNER
