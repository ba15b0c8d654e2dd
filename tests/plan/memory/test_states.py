"""Weights, gradients and optimizer state by strategy, against the tables that others published."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tunebook.config.choices import Compute, MasterWeights, MixedPrecision, Offload, OptimizerName, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.facts.sharing import is_cast_by_deepspeed
from tunebook.parallel.deepspeed import uses_autocast
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.states import state_bytes, state_bytes_with_offloaded

from ..plans import resolved

MIB = 2**20
CAST = MixedPrecision.cast


@pytest.mark.parametrize(
    ("settings", "bytes_per_parameter"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), 4 + 4 + 8),
        (ZeroConfig(strategy=Strategy.zero1), 4 + 4 + 12 / 8),
        # One pass's gradients, and the sum of several.
        (ZeroConfig(strategy=Strategy.zero2), 4 + (2 * 4 + 12) / 8),
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=CAST), 2 + (2 + 12) / 8),  # fullest before a pass's come
        (ZeroConfig(strategy=Strategy.zero2, offload_optimizer=Offload.cpu), 4),
        (ZeroConfig(strategy=Strategy.zero3), (4 + 4 + 12) / 8),  # fp32 weights are cloned
        (ZeroConfig(strategy=Strategy.zero3, mixed_precision=CAST), (2 + 2 + 12) / 8),
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.cpu), 4 / 8),
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.cpu, offload_parameters=Offload.cpu), 0),
        (FsdpConfig(strategy=Strategy.fsdp), (4 + 4 + 8) / 8),
        (FsdpConfig(strategy=Strategy.fsdp_grad_op), (4 + 4 + 8) / 8),  # what it gathers is a buffer
        (FsdpConfig(strategy=Strategy.hsdp, shard_group_size=4), (4 + 4 + 8) / 4),
        (FsdpConfig(strategy=Strategy.fsdp, offload_parameters=Offload.cpu), 0),
    ],
)
def test_states_are_divided_among_8_ranks(sound, settings, bytes_per_parameter):
    sound.parallelism, sound.hardware.gpus_per_node = settings, 8
    estimate = estimate_memory(sound, sound.model.facts)
    assert estimate.states_gib == pytest.approx(494_032_768 * bytes_per_parameter / GIB)


def test_moments_of_bitsandbytes_in_32_bits_are_fp32_beside_bf16_weights(sound):
    """Where torch's are in bf16, too."""
    sound.precision.master_weights = MasterWeights.bf16
    found = {}
    for name in (OptimizerName.adamw, OptimizerName.paged_adamw_32bit):
        sound.optimizer.name = name
        found[name] = state_bytes_with_offloaded(sound, sound.model.facts).optimizer / sound.model.facts.num_parameters
    assert found == {OptimizerName.adamw: 4, OptimizerName.paged_adamw_32bit: 8}


@pytest.mark.parametrize(("name", "moments"), [(OptimizerName.adafactor, (0, 0)), (OptimizerName.muon, (4, 8))])
def test_moments_of_matrices_and_of_the_rest(sound, name, moments):
    """The embeddings, which are the output head of this model, are no matrix of a layer."""
    sound.optimizer.name = name
    embeddings = sound.model.facts.vocab_size * sound.model.facts.hidden_size
    in_layers = sound.model.facts.num_parameters - embeddings
    expected = moments[0] * in_layers + moments[1] * embeddings
    assert state_bytes_with_offloaded(sound, sound.model.facts).optimizer == expected


def test_fp16_is_what_deepspeed_casts_whatever_is_set(sound):
    """And torch's autocast where it does not: the plan and `deepspeed.json` say the same of every run."""
    sound.hardware.gpus_per_node = 8
    found, formats = {}, (Compute.fp32, Compute.fp16, Compute.bf16)
    for stage, mixed, compute in product((Strategy.zero1, Strategy.zero3), MixedPrecision, formats):
        sound.parallelism, sound.precision.compute = ZeroConfig(strategy=stage, mixed_precision=mixed), compute
        is_mixed = compute is not Compute.fp32
        assert is_cast_by_deepspeed(sound) == (is_mixed and not uses_autocast(sound))
        found[stage, mixed, compute] = estimate_memory(sound, sound.model.facts).total_gib
    for stage in (Strategy.zero1, Strategy.zero3):
        assert found[stage, MixedPrecision.autocast, Compute.fp16] == found[stage, CAST, Compute.bf16]
        assert found[stage, MixedPrecision.autocast, Compute.fp16] < found[stage, MixedPrecision.autocast, Compute.bf16]


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), 120),
        (ZeroConfig(strategy=Strategy.zero1, mixed_precision=CAST), 31.4),
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=CAST), 16.6),
        (ZeroConfig(strategy=Strategy.zero3, mixed_precision=CAST), 1.9),
    ],
)
def test_the_table_of_the_zero_paper(sound, settings, gigabytes):
    """7.5 billion parameters on 64 GPUs with K = 12, in 10**9 bytes (Rajbhandari et al. 2020, figure 1)."""
    facts = replace(sound.model.facts, num_parameters=7_500_000_000)
    sound.parallelism, sound.hardware.gpus_per_node, sound.hardware.num_nodes = settings, 8, 8
    states = state_bytes(sound, facts)
    assert (states.weights + states.gradients + states.optimizer) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_16_bytes_per_parameter_are_24_gb_of_gpt2(sound):
    """1.5 billion parameters with Adam; mixed precision (2 + 2 + 12) and fp32 (4 + 4 + 8) come to the same."""
    facts = replace(sound.model.facts, num_parameters=1_500_000_000)
    for settings in (ParallelismConfig(strategy=Strategy.single), ZeroConfig(strategy=Strategy.zero1)):
        if isinstance(settings, ZeroConfig):
            settings.mixed_precision = CAST
        sound.parallelism = settings
        states = state_bytes(sound, facts)
        assert states.weights + states.gradients + states.optimizer == 24e9


def test_the_table_of_the_memory_slides_for_bert(sound):
    """bert-base-cased in float32: model and gradients 413.18 MB, the optimizer's step 1.61 GB, both in powers of 2."""
    states = state_bytes(sound, replace(sound.model.facts, num_parameters=108_310_272))
    assert states.weights / MIB == states.gradients / MIB == pytest.approx(413.18, abs=0.01)
    assert (states.weights + states.gradients + states.optimizer) / GIB == pytest.approx(1.61, abs=0.005)


def test_adapters_and_eight_bit_states(sound):
    sound.optimizer.name = OptimizerName.adamw_8bit
    # of the embeddings, which are the head, too, moments in 32 bits
    whole = 494_032_768 * 10 + 6 * 151_936 * 896
    assert estimate_memory(sound, sound.model.facts).states_gib == pytest.approx(whole / GIB)
    sound.parallelism = ZeroConfig(strategy=Strategy.zero1)  # whose flat copies transformers does not know
    whole = 494_032_768 * (10 + 4)  # and a master copy
    assert estimate_memory(sound, sound.model.facts).states_gib == pytest.approx(whole / GIB)
    sound.parallelism = ParallelismConfig(strategy=Strategy.single)
    sound.optimizer.name = OptimizerName.adamw
    sound.peft.method = PeftMethod.lora
    # rank x (inputs + outputs) of query and output, of key and value (2 heads of 64), and of the feed-forward's three
    adapter = 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)) * 24
    expected = 494_032_768 * 4 + adapter * 16
    assert estimate_memory(sound, sound.model.facts).states_gib == pytest.approx(expected / GIB)
    sound.precision.compute = Compute.fp8  # two copies of a byte in place of 4 bytes in the linear layers
    linear = (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) * 24
    assert estimate_memory(sound, sound.model.facts).states_gib == pytest.approx((expected - 2 * linear) / GIB)


@pytest.mark.parametrize(("samples", "accumulates"), [(8, False), (9, True)])
def test_a_step_whose_documents_all_fit_into_one_row_accumulates_nothing(samples, accumulates):
    words = ("hardware.gpus_per_node=1", "parallelism=single", "training.max_length=1024", "packing.row_length=8192",
             "activation=stored", "packing.mode=isolated")  # fmt: skip
    config = resolved("qwen3b_zero2", *words, f"training.global_samples={samples}")
    found, one_pass, several = (
        estimate_memory(config, config.model.facts, accumulates=known) for known in (None, False, True)
    )
    assert one_pass != several
    assert found == (several if accumulates else one_pass)
