"""Weights that are cast or gathered, and gradients on their way, at each moment of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.config.choices import Checkpointing, Compute, MasterWeights, MixedPrecision, Offload, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.ledger import Kind, Moment
from tunebook.plan.memory.rows import step_ledger
from tunebook.plan.memory.work import kept_by_mlp

from .layers import measured
from .live_tensors import ATTENTION

CAST = MixedPrecision.cast
HIDDEN, INNER, LAYERS, KEYS = 896, 4864, 24, 128  # of the sound configuration
UP = DOWN = HIDDEN * INNER
V = HIDDEN * KEYS


def buffers(config, moment, facts=None):
    """Bytes of what is gathered, cast or on its way."""
    ledger = step_ledger(config, facts or config.model.facts, accumulates=False)
    return sum(row.num_bytes for row in ledger.at(moment) if row.kind is Kind.buffers)


def copies(config):
    """Numbers of one layer whose copies are there."""
    return buffers(config, Moment.head) / 2 / LAYERS


def again(config):
    """The configuration with activation checkpointing."""
    return replace(config, activation=replace(config.activation, checkpointing=Checkpointing.enabled))


def arriving(config):
    """Bytes that gathering the output head takes in addition to what is there before and after."""
    return buffers(config, Moment.gather) - buffers(config, Moment.forward)


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
    offloaded.model.facts.measured = measured(
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
    assert buffers(on_the_host, Moment.start) == arriving * EMBEDDINGS
    facts.vocab_size = 10**8  # nothing else is as large
    ledger = step_ledger(on_the_host, facts, accumulates=False)
    assert (ledger.peak, sum(ledger.parts().values())) == (Moment.start, arriving * facts.vocab_size * HIDDEN)
    on_the_host.hardware.gpus_per_node = 2  # each has its share
    assert buffers(on_the_host, Moment.start) == 0


def test_embeddings_apart_from_a_trained_head_are_units_that_come_and_go(on_the_host):
    facts = on_the_host.model.facts
    on_the_host.peft.method = PeftMethod.full
    tied = buffers(again(on_the_host), Moment.last)
    facts.tie_word_embeddings = False
    facts.num_parameters += EMBEDDINGS
    apart = buffers(again(on_the_host), Moment.last)
    assert apart == pytest.approx(2 * 2 * LAYER, rel=0.001)  # the layer and its gradient
    assert tied - apart == 2 * EMBEDDINGS


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_frozen_head_from_the_host_stays_until_the_backward_pass_is_over(on_the_host, is_tied):
    """On one rank, with one layer."""
    facts = on_the_host.model.facts
    facts.tie_word_embeddings = is_tied
    facts.num_parameters += 0 if is_tied else EMBEDDINGS
    whole = buffers(again(on_the_host), Moment.last)
    assert whole == pytest.approx(2 * (EMBEDDINGS + LAYER), rel=0.001)
    expected = 0 if is_tied else (2 + 4) * EMBEDDINGS  # in bf16, and as it comes from the host
    assert arriving(on_the_host) == expected, "a tied one has been there since the pass began"
    on_the_host.peft.method = PeftMethod.qlora  # 4.127 bits of each number, whole or not
    in_four_bits = buffers(again(on_the_host), Moment.last) - 2 * EMBEDDINGS
    assert in_four_bits == pytest.approx(LAYER * 4.127 / 8, rel=0.002)


def test_two_ranks_gather_a_head_that_is_the_embeddings_again_only_from_their_hosts(on_the_host):
    on_the_host.hardware.gpus_per_node = 2
    assert arriving(on_the_host) == 2 * EMBEDDINGS
    on_the_host.parallelism.offload_parameters = Offload.none
    assert arriving(on_the_host) == 0


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
    for moment, (embeddings, layers) in (
        (Moment.forward, at_forward),
        (Moment.head, at_head),
        (Moment.cast, handing_on),
    ):
        assert buffers(sound, moment) == pytest.approx(2 * (embeddings * EMBEDDINGS + layers * LAYER), rel=0.001)
    assert arriving(sound) == 0, "less than with the head"


@pytest.mark.parametrize("master", [MasterWeights.fp32, MasterWeights.bf16])
def test_so_they_do_from_their_hosts(on_the_host, master):
    """Blocks of 6 layers of Qwen3-8B, in both formats, and of 9 of Llama 3 8B, on two H100."""
    on_the_host.hardware.gpus_per_node, on_the_host.precision.master_weights = 2, master
    on_the_host.peft.method = PeftMethod.full
    facts = on_the_host.model.facts
    facts.tie_word_embeddings = False
    facts.num_parameters += EMBEDDINGS
    found = buffers(on_the_host, Moment.head), buffers(on_the_host, Moment.cast)
    assert found == (2 * 2 * EMBEDDINGS, 2 * EMBEDDINGS)
    assert arriving(on_the_host) == 0


@pytest.mark.parametrize(("strategy", "layers"), [(Strategy.fsdp, 0), (Strategy.fsdp_grad_op, 1)])
def test_layers_that_are_not_resharded_are_whole_when_the_head_is_computed_however_they_are_kept(
    sound, strategy, layers
):
    """Activation checkpointing does not compute weights again."""
    sound.hardware.gpus_per_node, sound.parallelism = 2, FsdpConfig(strategy=strategy)
    found = buffers(again(sound), Moment.head)
    gathered = 2 * (LAYERS + 1) * LAYER * layers  # and the gradient of one
    assert found == pytest.approx(2 * EMBEDDINGS + gathered, rel=0.001)


def test_buffers_of_ddp_and_full_shard(sound):
    facts = sound.model.facts
    embeddings = 151_936 * 896
    layers, linear = sound.model.facts.measured.parameters, 24 * LAYER
    sound.hardware.gpus_per_node = 8
    sound.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    ddp = 2 * linear + 4 * 494_032_768  # autocast's copies, and as much in buckets as there are gradients
    assert estimate_memory(sound, facts).buffers_gib == pytest.approx(ddp / GIB)
    sound.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    head = 2 * (embeddings + layers / 24)  # in bf16: the layer that is needed next is gathered
    assert estimate_memory(sound, facts).buffers_gib == pytest.approx(head / GIB, rel=1e-6)
    backward = 2 * (embeddings + 3 * layers / 24)  # two layers are gathered, one has its gradient whole
    assert buffers(sound, Moment.last) == pytest.approx(backward, rel=1e-6)


def test_zero_3_counts_a_configured_bucket_and_limit(sound):
    facts = sound.model.facts  # of 0.49 billion parameters
    sound.hardware.gpus_per_node = 8
    sound.parallelism = ZeroConfig(strategy=Strategy.zero3)
    usual = estimate_memory(sound, facts).buffers_gib
    typed = {
        "reduce_bucket_size": 4 * 200_000_000,  # one buffer, overlapped or not
        "prefetch_bucket_size": 0,  # prefetched parameters count toward the limit of live ones
        "max_live_parameters": 0,  # the model has fewer than are kept by default
    }
    for key, more in typed.items():
        sound.parallelism = ZeroConfig(strategy=Strategy.zero3, **{key: 200_000_000})
        assert estimate_memory(sound, facts).buffers_gib - usual == pytest.approx(more / GIB), key
    facts.num_parameters, sound.parallelism = 3_000_000_000, ZeroConfig(strategy=Strategy.zero3)
    usual = estimate_memory(sound, facts).buffers_gib
    sound.parallelism.max_live_parameters = 2_500_000_000
    assert estimate_memory(sound, facts).buffers_gib - usual == pytest.approx(4 * 1_500_000_000 / GIB)


@pytest.mark.parametrize(
    ("size", "is_tied", "whole"), [(494_032_768, True, 494_032_768), (2_775_208_960, False, 1_000_000_000)]
)
def test_zero_3_on_one_gpu_keeps_offloaded_parameters_that_come_again_soon(sound, size, is_tied, whole):
    facts = sound.model.facts
    facts.num_parameters, facts.tie_word_embeddings = size, is_tied
    embeddings = 151_936 * 896
    head = 0 if is_tied else 4 * embeddings
    sound.parallelism = ZeroConfig(
        strategy=Strategy.zero3, offload_optimizer=Offload.cpu, offload_parameters=Offload.cpu
    )
    # All in fp32: gathered parameters, the head that arrives, autocast's copies, gradients of a layer and of the head.
    layers = facts.measured.parameters
    expected = 4 * (whole + embeddings) + 2 * 24 * LAYER + 4 * layers / 24 + head
    assert buffers(sound, Moment.head) == pytest.approx(expected, rel=1e-6)
    sound.hardware.gpus_per_node = 2  # which keep no copies; with a head of its own as much again as may be kept
    whole = min(layers + embeddings, 500_000_000 if is_tied else 1_000_000_000 + embeddings)
    assert buffers(sound, Moment.head) == 4 * whole


def reducing(config):
    """Bytes of the buckets of stages 1 and 2 while gradients are reduced."""
    rows = step_ledger(config, config.model.facts, accumulates=False).at(Moment.last)
    return sum(row.num_bytes for row in rows if row.label == "gradient buckets")


@pytest.mark.parametrize("strategy", [Strategy.zero1, Strategy.zero2])
def test_zero_1_and_2_reduce_gradients_through_buckets_of_their_own(sound, strategy):
    sound.parallelism = ZeroConfig(strategy=strategy)
    assert reducing(sound) == 4 * 896**2  # of the Trainer's size
    sound.parallelism.overlap_comm = True
    assert reducing(sound) == 2 * 4 * 896**2
    sound.parallelism.reduce_bucket_size = 500_000_000
    assert reducing(sound) == 2 * 4 * 5e8
    sound.parallelism.overlap_comm = False
    assert reducing(sound) == 4 * 5e8
    sound.parallelism.mixed_precision = CAST
    assert reducing(sound) == 2 * 5e8
    sound.peft.method = PeftMethod.lora  # made whole, however few gradients there are
    assert reducing(sound) == 2 * 5e8


@pytest.mark.parametrize(
    "settings",
    [
        ZeroConfig(strategy=Strategy.zero3, reduce_bucket_size=500_000_000),
        ParallelismConfig(strategy=Strategy.ddp),
        FsdpConfig(strategy=Strategy.fsdp),
    ],
)
def test_no_other_strategy_has_those_buckets(sound, settings):
    sound.parallelism = settings
    assert reducing(sound) == 0


@pytest.mark.parametrize("way", ["stored", "all layers", "recomputed", "offloaded", "compiled", "trained head"])
def test_adapters_on_the_attention_have_no_buckets_until_the_last_mlp_is_freed(sound, way):
    """DeepSpeed allocates them with the first gradient."""
    sound.parallelism = ZeroConfig(
        strategy=Strategy.zero2, overlap_comm=True, reduce_bucket_size=10_000_000, offload_optimizer=Offload.cpu
    )
    sound.peft.method, sound.peft.target_modules = PeftMethod.lora, [] if way == "all layers" else ["q_proj", "o_proj"]
    sound.peft.modules_to_save = ["lm_head"] if way == "trained head" else []
    sound.activation.checkpointing = Checkpointing.enabled if way == "recomputed" else Checkpointing.disabled
    sound.activation.offload, sound.model.compile_layers = way == "offloaded", way == "compiled"
    ledger = step_ledger(sound, sound.model.facts, accumulates=False)

    def bucket_bytes(moment: Moment) -> float:
        return sum(row.num_bytes for row in ledger.at(moment) if row.label == "gradient buckets")

    whole = 2 * 4 * 10_000_000
    if way != "stored":
        assert bucket_bytes(Moment.head) == 0.75 * whole and bucket_bytes(Moment.last) == whole
        return
    assert bucket_bytes(Moment.head) == bucket_bytes(Moment.reduce) == 0
    assert bucket_bytes(Moment.last) == max(0.0, whole - kept_by_mlp(sound, sound.model.facts)) < whole
    assert bucket_bytes(Moment.middle) == bucket_bytes(Moment.end) == whole


@pytest.mark.parametrize(
    ("strategy", "place", "num_layers", "num_heads"),
    [
        (Strategy.fsdp, Offload.none, 24, 2),  # the rank's share of the reduced gradient stays
        (Strategy.fsdp, Offload.cpu, 24, 1),
        (Strategy.fsdp, Offload.cpu, 1, 2),  # the embeddings are prefetched
        (Strategy.fsdp_grad_op, Offload.cpu, 24, 2),  # they stay gathered
    ],
)
def test_the_reduced_gradient_of_the_head_goes_to_the_host(sound, strategy, place, num_layers, num_heads):
    """torch 2.13 on pretended ranks held 4 bytes of each of the head's numbers then, and the rank's share of them."""
    sound.hardware.gpus_per_node, sound.parallelism = 2, FsdpConfig(strategy=strategy, offload_parameters=place)
    facts = replace(sound.model.facts, tie_word_embeddings=False, num_layers=num_layers)
    rows = step_ledger(sound, facts, accumulates=False).at(Moment.last)
    (found,) = [row.num_bytes for row in rows if row.label.startswith("gradient of the output head in transit")]
    assert found == num_heads * 2 * facts.vocab_size * HIDDEN
