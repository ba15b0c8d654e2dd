"""`plan --longest` and the plan of rows that GPUs share: what fits, and what the GPUs send each other."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tunebook.commands.plan import plan_command
from tunebook.config.choices import Checkpointing
from tunebook.data.batch import solve_batch
from tunebook.plan.longest import TILE_TOKENS, longest_rows, ways_to_keep_less
from tunebook.plan.memory import estimate_memory, fits_into
from tunebook.plan.memory.kept import tokens_per_pass
from tunebook.plan.speed.throughput import exchanged_bytes, plan_time

from .plans import resolution

RECIPE = ("qwen3_4b_lora", "peft=full", "hardware=hopper", "hardware.memory_gib=79.6", "parallelism=zero3")
IN_A_GROUP = ("hardware.gpus_per_node=2", "parallelism.sequence_group_size=2")
TILED = ["enabled in tiles", "enabled in tiles, offloaded"]


def planned(*words: str):
    return resolution(*RECIPE, *words)


def test_the_longest_row_fits_and_a_longer_one_does_not():
    found = planned(*IN_A_GROUP)
    rows = longest_rows(found).rows
    assert [(row.mlp_tile_tokens, row.offload) for row in rows] == [
        (None, False), (None, False), (TILE_TOKENS, False), (TILE_TOKENS, True),
    ]  # fmt: skip
    assert [row.tokens_by_memory for row in rows] == sorted(row.tokens_by_memory for row in rows)
    for row in rows:
        fits = []
        for tokens in (row.tokens_by_memory, row.tokens_by_memory + 256):
            config = planned(*IN_A_GROUP, *row.overrides, f"packing.row_length={tokens}").config
            kept = config.activation
            assert (kept.checkpointing.name, kept.mlp_tile_tokens, kept.offload) == (
                row.checkpointing, row.mlp_tile_tokens, row.offload,
            )  # fmt: skip
            tensors = estimate_memory(config, config.model.facts).total_gib
            fits.append(fits_into(config, tensors, 79.6))
        assert fits == [True, False]
        assert row.tokens == min(row.tokens_by_memory, 40_960)


def test_two_gpus_hold_a_row_twice_as_long_of_the_same_states():
    alone, shared = (longest_rows(planned("hardware.gpus_per_node=2", *words)).rows[0]
                     for words in (("activation=stored", "model.compile_layers=false"), IN_A_GROUP))  # fmt: skip
    assert alone.checkpointing == shared.checkpointing == "disabled"
    # what the exchange keeps takes a few percent of it
    assert 1.8 * alone.tokens_by_memory < shared.tokens_by_memory <= 2 * alone.tokens_by_memory


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (IN_A_GROUP, ["disabled", "enabled", *TILED]),
        (("hardware.gpus_per_node=2", "model.compile_layers=true", "parallelism=fsdp"),
         ["disabled", "selective", "enabled"]),
        (("hardware.gpus_per_node=2", "parallelism=fsdp"), ["disabled", "selective", "enabled", *TILED]),
        (("activation=stored",), ["disabled"]),
        (("activation=checkpointing",), ["enabled", *TILED]),
        (("activation.mlp_tile_tokens=4096",), TILED),
        (("activation.mlp_tile_tokens=4096", "activation.offload=true"), TILED[1:]),
        (("activation=checkpointing", "precision=fp8", "parallelism=fsdp"), ["enabled"]),
    ],
)  # fmt: skip
def test_each_way_that_may_be_taken_is_answered(words, ways):
    rows = longest_rows(planned(*words)).rows
    tiles = (" in tiles" if row.mlp_tile_tokens else "" for row in rows)
    offloaded = (", offloaded" if row.offload else "" for row in rows)
    assert [row.checkpointing + tile + away for row, tile, away in zip(rows, tiles, offloaded, strict=True)] == ways


def test_where_nothing_fits_or_nothing_is_known():
    small = longest_rows(planned("hardware.memory_gib=8", "hardware.gpus_per_node=1", "activation=stored"))
    assert [(row.tokens, row.memory_gib, row.overrides) for row in small.rows] == [(0, None, [])]
    none = "  none with activation.checkpointing=disabled: the rest of the plan does not fit into the memory of "
    assert small.lines()[1] == f"{none}the GPUs"
    offloaded = (
        "hardware.memory_gib=140",
        "parallelism=zero2_offload",
        "hardware.gpus_per_node=2",
        "activation=stored",
    )
    small = longest_rows(planned(*offloaded, "hardware.host_memory_gib=40"))
    assert [(row.tokens, row.is_limited_by_host) for row in small.rows] == [(0, True)]
    assert small.lines()[1] == f"{none}the host"
    found = planned(*IN_A_GROUP)
    unknown = replace(found, config=replace(found.config, model=replace(found.config.model, facts=None)))
    assert longest_rows(unknown).lines() == [
        "Longest row: not known: the model's size is not known before it is loaded"
    ]


def test_inputs_of_layers_on_the_host_take_blocks_of_a_power_of_two():
    """Two shared rows of Qwen3-4B in fp32: 36 inputs of up to 2 GiB on each GPU, which a longer row would double."""
    words = (
        "parallelism=fsdp", *IN_A_GROUP, "model.facts.max_position_embeddings=1048576", "precision.master_weights=fp32",
        "activation=checkpointing", "activation.mlp_tile_tokens=4096", "activation.offload=true",
    )  # fmt: skip
    on_gpus, on_host = (longest_rows(planned(*words, f"hardware.host_memory_gib={gib}")) for gib in (512, 256))
    (free,), (held,) = on_gpus.rows, on_host.rows
    assert (free.is_limited_by_host, held.is_limited_by_host) == (False, True)
    assert held.tokens == 2**31 // 2560 // 4 * 2 // 256 * 256 < free.tokens
    assert on_host.lines()[1].endswith("; a longer row would not fit into the host's memory")


def test_ways_that_only_cost_speed_are_not_printed():
    """The second way already holds as many tokens as the model has positions."""
    found = longest_rows(planned(*IN_A_GROUP))
    assert [row.tokens < row.tokens_by_memory for row in found.rows] == [False, True, True, True]
    assert sum("tokens with" in line for line in found.lines()) == 2
    assert "mlp_tile_tokens" not in "".join(found.lines())


def test_the_command_prints_it_and_adds_it_to_the_json(capsys):
    recipe, *words = (*RECIPE, *IN_A_GROUP)
    console = Console(file=io.StringIO(), width=200)
    assert plan_command(recipe, words, [], console, is_longest=True) == 0
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "Longest row shared by 2 GPUs (estimated, one document in each row, 79.6 GiB a GPU)"
    assert lines[3].startswith("  40,960 tokens with activation.checkpointing=enabled: ")
    assert lines[3].endswith("and the model has no more positions: model.yarn_factor stretches them")
    assert plan_command(recipe, words, [], console, is_longest=True, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["longest"]
    assert (found["sequence_group_size"], found["max_position_embeddings"]) == (2, 40_960)
    assert found["rows"][1]["overrides"][:2] == ["training.max_length=40960", "packing.row_length=40960"]


def test_a_group_counts_once_in_the_batch_and_has_a_part_of_the_row():
    config = planned("hardware.gpus_per_node=8", "parallelism.sequence_group_size=4").config
    batch = solve_batch(config, None)
    assert (batch.world_size, batch.data_ranks, batch.row_length) == (8, 2, 2048)
    assert tokens_per_pass(config) == 512
    assert config.attention.implementation.name == "varlen_attention" and not config.model.compile_layers


def test_what_the_gpus_of_a_group_send_is_not_counted_and_the_plan_says_so():
    config = planned(*IN_A_GROUP, "activation=stored").config
    # queries and results of 32 heads of 128, keys and values of 8, in 36 layers of 2 bytes, forward and backward; half
    # stays where it is
    assert exchanged_bytes(config, config.model.facts, 1024) == 1024 * 36 * 2 * (32 + 8) * 128 * 2 * 2 / 2
    again = replace(config, activation=replace(config.activation, checkpointing=Checkpointing.enabled))
    assert exchanged_bytes(again, config.model.facts, 1) == 1.5 * exchanged_bytes(config, config.model.facts, 1)
    batch = solve_batch(config, None)
    assumption = plan_time(config, batch).assumption
    assert "0.755 GB that each GPU sends in the attention of a pass are not counted" in assumption


def test_the_longest_padded_row_is_not_limited_by_the_documents_that_would_be_generated():
    long, short = (
        longest_rows(
            planned(
                "packing=padded",
                "hardware.gpus_per_node=8",
                "dataset=synthetic",
                f"dataset.synthetic.max_tokens={tokens}",
            )
        )
        for tokens in (100_000, 256)
    )
    assert long == short and long.rows[-1].tokens > 256


LONG_ROWS = ("training.max_length=65536", "packing.row_length=65536")
SHORT_ROWS = f"packing.row_length={2 * TILE_TOKENS}"  # of two tiles
IN_TILES = "activation.mlp_tile_tokens=4096"
OFFLOADED = f"{IN_TILES} activation.offload=true"


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (("activation=stored", SHORT_ROWS), ["selective", "enabled"]),
        (("activation=stored", "model.compile_layers=false", SHORT_ROWS), ["enabled"]),
        (("activation=checkpointing", SHORT_ROWS), []),
        (("activation=checkpointing", *LONG_ROWS), [IN_TILES, OFFLOADED]),
        (("activation=selective", *LONG_ROWS), ["enabled", f"enabled {IN_TILES}", f"enabled {OFFLOADED}"]),
        (("activation=checkpointing", "model.compile_layers=true", *LONG_ROWS), []),  # rules refuse compiled tiles
        (("activation=checkpointing", IN_TILES, *LONG_ROWS), ["activation.offload=true"]),
    ],
    ids=str,
)
def test_ways_that_keep_less_are_those_that_come_after_the_present_one(words, ways):
    """They are in a run's plan.json, from which a rank that runs out of memory takes its advice."""
    on_a_gpu = ("hardware=hopper", "hardware.memory_gib=79.6", "parallelism=single")
    found = ways_to_keep_less(resolution("qwen3_4b_lora", *on_a_gpu, *words))
    assert [way.replace("activation.checkpointing=", "") for way in found] == ways
