"""Of copies that autocast makes, which are on the device while the output head is computed."""

from __future__ import annotations

import pytest

from tunebook.config.choices import MasterWeights, PeftMethod
from tunebook.config.estimate.buffers import buffer_bytes
from tunebook.config.model_facts import MeasuredLayers

from .live_tensors import ATTENTION

HIDDEN, INNER, LAYERS, KEYS = 896, 4864, 24, 128  # of the sound configuration
UP = DOWN = HIDDEN * INNER
V = HIDDEN * KEYS


def copies(config):
    """Numbers of one layer whose copies are there."""
    return buffer_bytes(config, config.model.facts, is_recomputed=False) / 2 / LAYERS


@pytest.fixture
def offloaded(sound):
    sound.peft.method, sound.peft.dropout, sound.activation.offload = PeftMethod.lora, 0.0, True
    return sound


@pytest.mark.parametrize(
    ("targets", "stay"),
    [
        ([], 0),  # an adapter's tensors are between
        ([*ATTENTION], UP),  # as large as gate's, which has left, and where that was
        (["q_proj", "v_proj"], V + UP),
        (["k_proj", "gate_proj"], DOWN),
        (["gate_proj", "up_proj", "down_proj"], V),
        (["k_proj", "gate_proj", "up_proj"], 0),
    ],
    ids=lambda value: "-".join(value) or "all" if isinstance(value, list) else "",
)
def test_offloading_takes_the_next_frozen_weights_copy_for_the_one_before(offloaded, targets, stay):
    offloaded.peft.target_modules = targets
    assert copies(offloaded) == stay
    offloaded.precision.master_weights = MasterWeights.bf16
    assert copies(offloaded) == 0, "nothing is cast"


def test_of_three_equal_weights_the_second_stays(offloaded):
    """As query, key and value of OLMo; and what two of the same size are called is of no account."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    sizes = [[HIDDEN, HIDDEN]] * 4 + [[HIDDEN, INNER], [INNER, HIDDEN]]
    adapters = {name: [LAYERS * inputs, LAYERS * outputs] for name, (inputs, outputs) in zip(names, sizes, strict=True)}
    offloaded.model.facts.measured = MeasuredLayers(
        num_layers=LAYERS, parameters=1, linear_inputs=1, adapter_parameters=1, adapters=adapters
    )
    offloaded.peft.target_modules = ["fc1"]
    assert copies(offloaded) == HIDDEN * HIDDEN
    offloaded.peft.target_modules = ["q_proj", "k_proj"]  # what attention keeps is between value and output
    assert copies(offloaded) == DOWN


def test_all_copies_of_trained_weights_stay(offloaded):
    offloaded.peft.method = PeftMethod.full
    every = 2 * HIDDEN * (HIDDEN + KEYS) + 3 * HIDDEN * INNER
    assert copies(offloaded) == pytest.approx(every, rel=0.001)  # and biases
