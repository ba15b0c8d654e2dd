"""The host's memory worked out by hand, and what loading took where it was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config.choices import (
    Checkpointing,
    Compute,
    Generation,
    MasterWeights,
    MixedPrecision,
    Offload,
    OptimizerName,
    PeftMethod,
    Strategy,
    Weights,
)
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.model.parameters import count_parameters
from tunebook.plan.memory.host import (
    host_bytes,
    loading_bytes,
    offloaded_activation_bytes,
    offloaded_bytes,
    saving_bytes,
)
from tunebook.plan.memory.kept import inputs_of_layers, kept_by_layers, kept_by_one_layer

from ..plans import resolved
from .layers import llama_layers

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "loading_memory.jsonl"
GIB, MIB, BILLION = 2**30, 2**20, 10**9
CPU, NVME, CAST = Offload.cpu, Offload.nvme, MixedPrecision.cast
# The model that loading was measured with: its largest parameters are the embeddings and the head.
MEASURED = {
    "num_parameters": 1_011_959_808, "num_layers": 20, "hidden_size": 2048, "intermediate_size": 5632,
    "vocab_size": 32_000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def eight(sound):
    """A model of a billion parameters on two nodes of 4 GPUs, its facts beside it."""
    sound.hardware.num_nodes, sound.hardware.gpus_per_node = 2, 4
    facts = replace(sound.model.facts, num_parameters=BILLION, vocab_size=100_000, hidden_size=1000)
    facts.measured = llama_layers(facts)
    return sound, facts


@pytest.mark.parametrize(
    ("settings", "host", "nvme"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), 0, 0),
        (ZeroConfig(strategy=Strategy.zero2), 0, 0),
        # master copy, two moments and their gradient in fp32, and the updated weights on their way back
        (ZeroConfig(strategy=Strategy.zero2, offload_optimizer=CPU), 16 + 4, 0),
        (ZeroConfig(strategy=Strategy.zero2, offload_optimizer=CPU, mixed_precision=CAST), 16 + 2, 0),
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=CPU), 16 + 4, 0),
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=CPU, offload_parameters=CPU), 16 + 4 + 4, 0),
        (FsdpConfig(strategy=Strategy.fsdp, offload_parameters=CPU), 4 + 4 + 8, 0),
        # gradients, and 4 buffers of the whole share in fp32, which is smaller than a sub-group
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=NVME), 4 + 4 * 4, 16),
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=NVME, sub_group_size=25_000_000), 4 + 4 * 4 / 5, 16),
        # 5 buffers of 10**8 elements on each of 8 ranks, and the share that stays in memory
        (ZeroConfig(strategy=Strategy.zero3, offload_parameters=NVME), 5 * 0.1 * 4 * 8 + 4, 4),
    ],
)
def test_what_all_ranks_offload_of_a_billion_parameters(eight, settings, host, nvme):
    config, facts = eight
    config.parallelism = settings
    found = offloaded_bytes(config, facts)
    assert 8 * found.host == pytest.approx(host * BILLION)
    assert 8 * found.nvme == pytest.approx(nvme * BILLION)


def test_bf16_weights_halve_what_fsdp_offloads(eight):
    config, facts = eight
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp, offload_parameters=CPU)
    config.precision.master_weights = MasterWeights.bf16
    assert 8 * offloaded_bytes(config, facts).host == pytest.approx(8 * BILLION)


@pytest.mark.parametrize(
    ("settings", "changes", "copies"),
    [
        (ParallelismConfig(strategy=Strategy.single), {}, 4),  # copied from rank 0's GPU
        (ZeroConfig(strategy=Strategy.zero1), {}, 4 * 4),  # on each of the node's ranks
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=CAST), {}, 4 * 2),
        (ZeroConfig(strategy=Strategy.zero3), {}, 4),
        (ZeroConfig(strategy=Strategy.zero3, gather_weights_on_save=False), {}, 0),
        (FsdpConfig(strategy=Strategy.fsdp), {}, 4),
        (FsdpConfig(strategy=Strategy.hsdp, shard_group_size=4), {}, 4),
    ],
)
def test_what_saving_copies_of_a_billion_parameters(eight, settings, changes, copies):
    config, facts = eight
    config.parallelism = settings
    assert saving_bytes(config, facts) == pytest.approx(copies * BILLION)


def test_an_adapter_is_saved_alone_where_it_can_be(eight):
    config, facts = eight
    config.peft.method = PeftMethod.lora
    adapter = 16 * (2 * 2000 + 2 * (1000 + 1000 * 2 // 14) + 3 * (1000 + 4864)) * 24 * 4
    for settings in (ParallelismConfig(strategy=Strategy.ddp), ZeroConfig(strategy=Strategy.zero3)):
        config.parallelism = settings
        assert saving_bytes(config, facts) == adapter
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    assert saving_bytes(config, facts) == pytest.approx(4 * BILLION + adapter)


def test_a_large_model_is_copied_from_a_gpu_file_by_file(eight):
    config, facts = eight
    config.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    assert saving_bytes(config, replace(facts, num_parameters=70 * BILLION)) == 50_000_000_000


@pytest.mark.parametrize(
    ("settings", "weights", "gigabytes"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), Weights.pretrained, 4 * 0.4),  # one matrix at a time into each GPU
        (ParallelismConfig(strategy=Strategy.ddp), Weights.random, 4),  # rank 0 draws
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=CAST), Weights.pretrained, 4 * 4),
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=CAST), Weights.random, 4 * 4),
        (ZeroConfig(strategy=Strategy.zero3), Weights.pretrained, 2 * 0.4),
        (ZeroConfig(strategy=Strategy.zero3, offload_parameters=CPU), Weights.pretrained, 2 * 0.4 + 4 / 2),
        (FsdpConfig(strategy=Strategy.fsdp), Weights.pretrained, 4),
        (FsdpConfig(strategy=Strategy.fsdp, cpu_ram_efficient_loading=False), Weights.pretrained, 4 * 4),
        (FsdpConfig(strategy=Strategy.fsdp, offload_parameters=CPU), Weights.pretrained, 4 + 4 / 2),
    ],
)
def test_what_a_node_holds_while_loading(eight, settings, weights, gigabytes):
    config, facts = eight
    config.parallelism, config.model.weights = settings, weights
    assert loading_bytes(config, facts) == pytest.approx(gigabytes * BILLION)


def test_quantized_weights_are_read_one_by_one_by_each_rank(eight):
    config, facts = eight
    config.parallelism, config.peft.method = FsdpConfig(strategy=Strategy.fsdp), PeftMethod.qlora
    assert loading_bytes(config, facts) == 4 * 4 * 100_000 * 1000


@pytest.mark.parametrize("name", ["zero3", "zero3_cast", "fsdp", "fsdp_upstream", "ddp"])
def test_loading_takes_what_was_measured(sound, name):
    """Anonymous memory of all ranks with the shards that stay on a CPU, within 6%."""
    (run,) = [line for line in map(json.loads, RESULTS.read_text().splitlines()) if line["name"] == name]
    sound.hardware.gpus_per_node = run["ranks"]
    # FSDP is for GPUs: on the CPU that was measured, its weights stood where they would on a GPU's host.
    sound.hardware.generation = Generation.hopper if name.startswith("fsdp") else Generation.cpu
    sound.precision.compute = Compute.fp32 if name == "zero3" else Compute.bf16
    sound.parallelism = {
        "zero3": ZeroConfig(strategy=Strategy.zero3),
        "zero3_cast": ZeroConfig(strategy=Strategy.zero3, mixed_precision=CAST),
        "fsdp": FsdpConfig(strategy=Strategy.fsdp),
        "fsdp_upstream": FsdpConfig(strategy=Strategy.fsdp, cpu_ram_efficient_loading=False),
        "ddp": ParallelismConfig(strategy=Strategy.ddp),
    }[name]
    ranks = [rank["loaded"] for rank in run["by_rank"]]
    measured = sum(rank["anonymous_mib"] + rank["own_shard_mib"] for rank in ranks)
    facts = replace(sound.model.facts, **MEASURED)
    facts.measured = llama_layers(facts)
    assert loading_bytes(sound, facts) / MIB == pytest.approx(measured, rel=0.07)


def test_the_peak_is_not_the_sum(eight):
    config, facts = eight
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp, offload_parameters=CPU)
    found = host_bytes(config, facts, tensors=5 * GIB)
    assert (found.processes, found.training, found.nvme) == (4 * 2 * GIB, 0, 0)
    assert found.offload == pytest.approx(8 * BILLION)  # half of 16 bytes each is on this node
    assert found.peak == found.processes + found.offload + found.saving
    much = replace(found, loading=100.0 * GIB)
    assert much.peak == much.processes + 100 * GIB


def test_on_a_cpu_the_ranks_train_in_the_hosts_memory(sound):
    sound.hardware.generation, sound.hardware.gpus_per_node = Generation.cpu, 2
    found = host_bytes(sound, sound.model.facts, tensors=5 * GIB)
    assert (found.processes, found.training) == (2 * 418 * MIB, 10 * GIB)
    assert found.peak == found.processes + found.training + found.saving


def test_paged_moments_and_offloaded_activations_are_on_the_host(sound):
    sound.hardware.gpus_per_node = 1
    facts, sound.optimizer.name = sound.model.facts, OptimizerName.paged_adamw_32bit
    sound.activation.offload, sound.activation.checkpointing = True, Checkpointing.enabled
    kept = inputs_of_layers(sound, facts) + kept_by_one_layer(sound, facts)
    found = host_bytes(sound, facts, tensors=0)
    assert found.offload == pytest.approx(8 * facts.num_parameters + kept)


@pytest.mark.parametrize(
    ("strategy", "checkpointing", "copies"),
    [
        (Strategy.single, Checkpointing.disabled, 2),  # autocast's, which go with the activations
        (Strategy.single, Checkpointing.selective, 0),  # each layer's are made again
        (Strategy.fsdp, Checkpointing.disabled, 0),  # what it gathers in bf16 is left to it
    ],
)
def test_copies_of_weights_go_to_the_host_with_the_activations(sound, strategy, checkpointing, copies):
    sound.hardware.gpus_per_node, sound.activation.offload = 2, True
    sound.activation.checkpointing = checkpointing
    if strategy is Strategy.fsdp:
        sound.parallelism = FsdpConfig(strategy=strategy)
    facts = sound.model.facts
    kept = kept_by_layers(sound, facts)
    found = offloaded_activation_bytes(sound, facts)
    assert found - kept == pytest.approx(copies * count_parameters(sound, facts).linear)
    assert host_bytes(sound, facts, tensors=0).offload == pytest.approx(2 * found)


@pytest.mark.parametrize(
    ("recipe", "offload_gib", "nvme_gib"),
    [("llama2_70b_fsdp_1node", 16 * 68_976_648_192 / GIB, 0), ("dolly3b_zero3_nvme", None, 20 * 2_775_086_080 / GIB)],
)
def test_recipes_that_say_what_their_host_needs(recipe, offload_gib, nvme_gib):
    """Llama 2 70B on one node: 16 bytes for each of 69.0 billion parameters are 1,028 GiB, as its card says."""
    config = resolved(recipe)
    found = host_bytes(config, config.model.facts, tensors=0)
    assert found.nvme / GIB == pytest.approx(nvme_gib)
    if offload_gib is not None:
        assert found.offload / GIB == pytest.approx(offload_gib, rel=1e-6) == pytest.approx(1028, abs=0.5)
