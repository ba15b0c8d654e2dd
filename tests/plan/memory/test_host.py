"""The host's memory worked out by hand, and what loading took where it was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config.choices import (
    Compute,
    Generation,
    MixedPrecision,
    Offload,
    PeftMethod,
    Strategy,
    Weights,
)
from tunebook.config.compose import compose
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory import estimate_memory
from tunebook.plan.memory.activations import activations_of
from tunebook.plan.memory.host import (
    host_bytes,
    loading_bytes,
    offloaded_bytes,
    saving_bytes,
)

from ..plans import NO_GPU
from .layers import llama_layers

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "loading_memory.jsonl"
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


def by_torch(*sizes):
    """Bytes of page-locked blocks: PyTorch takes the next power of two."""
    return sum(next(2**power for power in range(50) if 2**power >= size) for size in sizes)


SHARE = BILLION // 8  # parameters of each rank
WHOLE, HALF = by_torch(4 * SHARE), by_torch(2 * SHARE)  # blocks of a rank's share in fp32 and in bf16


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), 0),
        (ZeroConfig(strategy=Strategy.zero2), 0),
        # two moments, master copy, gradient, the updated weights on their way back and the largest gradient
        (ZeroConfig(strategy=Strategy.zero2, offload_optimizer=CPU), 8 * SHARE + 3 * WHOLE + by_torch(400_000_000)),
        (
            ZeroConfig(strategy=Strategy.zero2, offload_optimizer=CPU, mixed_precision=CAST),
            8 * SHARE + 2 * WHOLE + HALF + by_torch(200_000_000),
        ),
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=CPU), 12 * SHARE + 2 * WHOLE),
        (  # gradients of three sub-groups, the last of which is half full
            ZeroConfig(strategy=Strategy.zero3, offload_optimizer=CPU, sub_group_size=50_000_000),
            12 * SHARE + 3 * by_torch(200_000_000) + WHOLE,
        ),
        # gradients, and 4 buffers of the whole share in fp32, which is smaller than a sub-group
        (ZeroConfig(strategy=Strategy.zero3, offload_optimizer=NVME), WHOLE + 4 * 4 * SHARE),
        (
            ZeroConfig(strategy=Strategy.zero3, offload_optimizer=NVME, sub_group_size=25_000_000),
            WHOLE + 4 * 4 * SHARE / 5,
        ),
        # 5 buffers of 10**8 elements, and the share that stays in memory
        (ZeroConfig(strategy=Strategy.zero3, offload_parameters=NVME), 5 * 4 * 10**8 + WHOLE),
    ],
)
def test_what_a_rank_offloads_of_a_billion_parameters(eight, settings, host):
    config, facts = eight
    config.parallelism = settings
    assert offloaded_bytes(config, facts) == pytest.approx(host)


MEASURED_HOSTS = [
    pytest.param(
        line,
        id=f"{line['series']}-{line['name']}",
        marks=[] if line["name"] in ("fsdp_offload", "zero2_offload") else [pytest.mark.nightly],
    )
    for file in ("h200x2_host_memory", "h200x2_sequence")
    for line in map(json.loads, (RESULTS.parent / f"{file}.jsonl").read_text().splitlines())
    if "host_peak_gib" in line and line.get("offloaded_by") != "trl"  # which copied more, and one tensor at a time
]


@pytest.mark.parametrize("line", MEASURED_HOSTS)
def test_what_is_offloaded_takes_what_was_measured(line):
    """Of processes that trained and saved nothing: all memory within 4% or 0.5 GiB, blocks of activations within 2%."""
    config = compose(None, [*line["overrides"], *line["resolved"]]).config
    config = resolve_auto(config, NO_GPU).config
    found = host_bytes(config, config.model.facts)
    measured = sum(line.get("host_gib", line["host_peak_gib"]))
    assert (found.processes + found.offload) / GIB == pytest.approx(measured, rel=0.04, abs=0.5)
    if config.activation.offload:
        locked = activations_of(config, accumulates=False).offloaded / GIB
        assert locked == pytest.approx(line["host_pinned_gib"][0], rel=0.02)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        (ParallelismConfig(strategy=Strategy.single), 4),  # copied from rank 0's GPU
        (ZeroConfig(strategy=Strategy.zero1), 4 * 4),  # on each of the node's ranks
        (ZeroConfig(strategy=Strategy.zero3), 4),
        (FsdpConfig(strategy=Strategy.fsdp), 4),
    ],
)
def test_what_saving_copies_of_a_billion_parameters(eight, settings, copies):
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


@pytest.mark.parametrize(
    ("settings", "weights", "gigabytes"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), Weights.pretrained, 4 * 0.4),  # one matrix at a time into each GPU
        (ParallelismConfig(strategy=Strategy.ddp), Weights.random, 4),  # rank 0 draws
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=CAST), Weights.pretrained, 4 * 4),
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


def test_on_a_cpu_the_ranks_train_in_the_hosts_memory(sound):
    sound.hardware.generation, sound.hardware.gpus_per_node = Generation.cpu, 2
    found, tensors = host_bytes(sound, sound.model.facts), estimate_memory(sound, sound.model.facts).total_gib
    assert (found.processes, found.training) == (2 * 502 * MIB, pytest.approx(2 * tensors * GIB))
    assert found.peak == found.processes + found.training + found.saving
