"""Of copies that autocast makes, which are on the device while the output head is computed, and of what is gathered."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Compute, MasterWeights, Offload, PeftMethod, Strategy
from tunebook.config.model_facts import MeasuredLayers
from tunebook.config.schema import FsdpConfig
from tunebook.plan.memory.buffers import (
    backward_buffer_bytes,
    buffer_bytes,
    first_gathering_bytes,
    forward_buffer_bytes,
    gathering_bytes,
    handing_on_buffer_bytes,
)
from tunebook.plan.memory.moments import fullest_moment

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


EMBEDDINGS = 151_936 * HIDDEN
LAYER = 2 * HIDDEN * (HIDDEN + KEYS) + 3 * HIDDEN * INNER


@pytest.fixture
def on_the_host(sound):
    """Adapters under FSDP on one GPU, with all parameters on its host."""
    sound.parallelism = FsdpConfig(strategy=Strategy.fsdp, offload_parameters=Offload.cpu)
    sound.peft.method, sound.peft.dropout = PeftMethod.lora, 0.0
    return sound


@pytest.mark.parametrize(
    ("master", "compute", "arriving"),
    [
        (MasterWeights.fp32, Compute.bf16, 4 + 2 + 2),  # as it is there, cast, and whole
        (MasterWeights.bf16, Compute.bf16, 2 + 2),
        (MasterWeights.fp32, Compute.fp32, 4 + 4),
    ],
)
def test_one_rank_fetches_all_of_the_embeddings_from_its_host(on_the_host, master, compute, arriving):
    on_the_host.precision.master_weights, on_the_host.precision.compute = master, compute
    facts = on_the_host.model.facts
    assert first_gathering_bytes(on_the_host, facts) == arriving * EMBEDDINGS
    facts.vocab_size = 10**8  # nothing else is as large
    moment = fullest_moment(on_the_host, facts, accumulates=False)
    assert moment.total == arriving * facts.vocab_size * HIDDEN
    on_the_host.hardware.gpus_per_node = 2  # each has its share
    assert first_gathering_bytes(on_the_host, facts) == 0


def test_embeddings_apart_from_a_trained_head_are_units_that_come_and_go(on_the_host):
    facts = on_the_host.model.facts
    on_the_host.peft.method = PeftMethod.full
    tied = backward_buffer_bytes(on_the_host, facts, is_recomputed=True)
    facts.tie_word_embeddings = False
    facts.num_parameters += EMBEDDINGS
    apart = backward_buffer_bytes(on_the_host, facts, is_recomputed=True)
    assert apart == pytest.approx(2 * 3 * LAYER, rel=0.001)  # the layer, the next, and its gradient
    assert tied - apart == 2 * EMBEDDINGS


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_frozen_head_from_the_host_stays_until_the_backward_pass_is_over(on_the_host, is_tied):
    """On one rank with a layer and the matrix that arrives of the next: in fp32 as it is there, and cast."""
    facts = on_the_host.model.facts
    facts.tie_word_embeddings = is_tied
    facts.num_parameters += 0 if is_tied else EMBEDDINGS
    whole = backward_buffer_bytes(on_the_host, facts, is_recomputed=True)
    assert whole == pytest.approx(2 * EMBEDDINGS + 2 * LAYER + (4 + 2) * HIDDEN * INNER, rel=0.001)
    expected = 0 if is_tied else (2 + 4) * EMBEDDINGS  # in bf16, and as it comes from the host
    assert gathering_bytes(on_the_host, facts) == expected, "a tied one has been there since the pass began"
    on_the_host.peft.method = PeftMethod.qlora  # 4.127 bits of each number, whole or not
    in_four_bits = backward_buffer_bytes(on_the_host, facts, is_recomputed=True) - 2 * EMBEDDINGS
    assert in_four_bits == pytest.approx((LAYER + HIDDEN * INNER) * 4.127 / 8, rel=0.002)


def test_two_ranks_gather_a_head_that_is_the_embeddings_again_only_from_their_hosts(on_the_host):
    on_the_host.hardware.gpus_per_node = 2
    facts = on_the_host.model.facts
    assert gathering_bytes(on_the_host, facts) == 2 * EMBEDDINGS
    on_the_host.parallelism.offload_parameters = Offload.none
    assert gathering_bytes(on_the_host, facts) == 0


@pytest.mark.parametrize(
    ("strategy", "at_forward", "at_head", "handing_on"),
    [
        (Strategy.fsdp, (0, 2), (2, 0), (1, 0)),  # the head, and what arrived of it until the forward pass is over
        (Strategy.hsdp, (0, 2), (2, 0), (1, 0)),
        (Strategy.fsdp_grad_op, (1, LAYERS + 1), (3, LAYERS), (2, LAYERS)),  # and the embeddings before it
    ],
)
def test_several_ranks_gather_a_head_of_its_own_behind_all_layers(sound, strategy, at_forward, at_head, handing_on):
    """In whole embeddings and layers, in bf16; as found block by block on two H100, of Qwen2.5-14B and Qwen3-8B."""
    sound.hardware.gpus_per_node, sound.parallelism = 4, FsdpConfig(strategy=strategy, shard_group_size=2)
    facts = sound.model.facts
    facts.tie_word_embeddings = False
    facts.num_parameters += EMBEDDINGS
    for found, (embeddings, layers) in (
        (forward_buffer_bytes(sound, facts, is_recomputed=False), at_forward),
        (buffer_bytes(sound, facts, is_recomputed=False), at_head),
        (handing_on_buffer_bytes(sound, facts, is_recomputed=False), handing_on),
    ):
        assert found == pytest.approx(2 * (embeddings * EMBEDDINGS + layers * LAYER), rel=0.001)
    assert gathering_bytes(sound, facts) == 0, "less than with the head"


@pytest.mark.parametrize("master", [MasterWeights.fp32, MasterWeights.bf16])
def test_so_they_do_from_their_hosts(on_the_host, master):
    """Blocks of 6 layers of Qwen3-8B, in both formats, and of 9 of Llama 3 8B, on two H100."""
    on_the_host.hardware.gpus_per_node, on_the_host.precision.master_weights = 2, master
    on_the_host.peft.method = PeftMethod.full
    facts = on_the_host.model.facts
    facts.tie_word_embeddings = False
    facts.num_parameters += EMBEDDINGS
    at_head = buffer_bytes(on_the_host, facts, is_recomputed=False)
    handing_on = handing_on_buffer_bytes(on_the_host, facts, is_recomputed=False)
    assert (at_head, handing_on) == (2 * 2 * EMBEDDINGS, 2 * EMBEDDINGS)
    assert gathering_bytes(on_the_host, facts) == 0


@pytest.mark.parametrize(
    ("method", "master", "is_compiled", "layers"),
    [
        (PeftMethod.lora, MasterWeights.bf16, False, 1),
        (PeftMethod.lora, MasterWeights.bf16, True, 0),
        (PeftMethod.lora, MasterWeights.fp32, False, 0),
        (PeftMethod.full, MasterWeights.bf16, False, 0),
    ],
)
def test_a_layer_more_with_adapters_in_bf16_where_layers_are_computed_again(sound, method, master, is_compiled, layers):
    sound.hardware.gpus_per_node, sound.parallelism = 2, FsdpConfig(strategy=Strategy.fsdp)
    sound.peft.method, sound.precision.master_weights = method, master
    sound.model.compile_layers = is_compiled
    again, stored = (
        backward_buffer_bytes(sound, sound.model.facts, is_recomputed=is_again) for is_again in (True, False)
    )
    assert again - stored == pytest.approx(2 * LAYER * layers, rel=0.001)


@pytest.mark.parametrize(("strategy", "layers"), [(Strategy.fsdp, 0), (Strategy.fsdp_grad_op, 1)])
def test_layers_that_are_not_resharded_are_whole_when_the_head_is_computed_however_they_are_kept(
    sound, strategy, layers
):
    """Activation checkpointing does not compute weights again."""
    sound.hardware.gpus_per_node, sound.parallelism = 2, FsdpConfig(strategy=strategy)
    again = buffer_bytes(sound, sound.model.facts, is_recomputed=True)
    gathered = 2 * (LAYERS + 1) * LAYER * layers  # and the gradient of one
    assert again == pytest.approx(2 * EMBEDDINGS + gathered, rel=0.001)
