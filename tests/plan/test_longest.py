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
from tunebook.plan.longest import longest_rows
from tunebook.plan.memory import tensors_fit
from tunebook.plan.memory.kept import tokens_per_pass
from tunebook.plan.speed.throughput import exchanged_bytes, plan_time

from .plans import resolution

RECIPE = ("qwen3_4b_lora", "peft=full", "hardware=hopper", "hardware.memory_gib=79.6", "parallelism=zero3")
IN_A_GROUP = ("hardware.gpus_per_node=2", "parallelism.sequence_group_size=2")


def planned(*words: str):
    return resolution(*RECIPE, *words)


def test_the_longest_row_fits_and_a_longer_one_does_not():
    rows = longest_rows(planned(*IN_A_GROUP))
    assert [row.activation for row in rows] == [[f"activation.checkpointing={way}"] for way in ("disabled", "enabled")]
    first, last = rows
    assert (last.tokens, last.has_all_positions) == (40_960, True)  # so no slower way is tried
    fits = []
    for tokens in (first.tokens, first.tokens + 256):
        config = planned(*IN_A_GROUP, *first.overrides, f"packing.row_length={tokens}").config
        fits.append(tensors_fit(config))
    assert fits == [True, False]


def test_two_gpus_hold_a_row_twice_as_long_of_the_same_states():
    alone, shared = (longest_rows(planned("hardware.gpus_per_node=2", *words))[0]
                     for words in (("activation=stored", "model.compile_layers=false"), IN_A_GROUP))  # fmt: skip
    assert alone.activation == shared.activation
    # what the exchange keeps takes a few percent of it
    assert 1.8 * alone.tokens < shared.tokens <= 2 * alone.tokens


MANY_POSITIONS = "model.facts.max_position_embeddings=1048576"
TILED = ["enabled 4096", "enabled 4096 true"]


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
    rows = longest_rows(planned(MANY_POSITIONS, *words))
    assert [" ".join(word.partition("=")[2] for word in row.activation) for row in rows] == ways
    assert [row.tokens for row in rows] == sorted(row.tokens for row in rows)


def test_where_nothing_fits_or_nothing_is_known():
    (small,) = longest_rows(planned("hardware.memory_gib=8", "hardware.gpus_per_node=1", "activation=stored"))
    assert (small.tokens, small.line()) == (0, "  none with activation.checkpointing=disabled")
    offloaded = ("parallelism=zero2_offload", "hardware.gpus_per_node=2", "activation=stored")
    (small,) = longest_rows(planned(*offloaded, "hardware.memory_gib=140", "hardware.host_memory_gib=40"))
    assert small.tokens == 0
    found = planned(*IN_A_GROUP)
    unknown = replace(found, config=replace(found.config, model=replace(found.config.model, facts=None)))
    assert longest_rows(unknown) == []


def test_inputs_of_layers_on_the_host_take_blocks_of_a_power_of_two():
    """Two shared rows of Qwen3-4B in fp32: 36 inputs of up to 2 GiB on each GPU, which a longer row would double."""
    words = (
        "parallelism=fsdp", *IN_A_GROUP, MANY_POSITIONS, "precision.master_weights=fp32",
        "activation=checkpointing", "activation.mlp_tile_tokens=4096", "activation.offload=true",
    )  # fmt: skip
    (free,), (held,) = (longest_rows(planned(*words, f"hardware.host_memory_gib={gib}")) for gib in (512, 256))
    assert held.tokens == 2**31 // 2560 // 4 * 2 // 256 * 256 < free.tokens


def test_the_command_prints_it_and_adds_it_to_the_json(capsys):
    recipe, *words = (*RECIPE, *IN_A_GROUP)
    console = Console(file=io.StringIO(), width=200)
    assert plan_command(recipe, words, [], console, is_longest=True) == 0
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "Longest row shared by 2 GPUs (estimated, one document in each row, 79.6 GiB a GPU)"
    assert lines[2].startswith("  40,960 tokens, all positions of the model, in ")
    assert plan_command(recipe, words, [], console, is_longest=True, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["longest"]
    assert rows[1]["overrides"][:2] == ["training.max_length=40960", "packing.row_length=40960"]


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
    assert long == short and long[-1].tokens > 256
