"""`plan --longest`, and the plan of rows that GPUs share."""

from __future__ import annotations

from tunebook.plan.alternatives import LongestRow, longest_row
from tunebook.plan.draft import draft_run
from tunebook.plan.memory.verdict import tensors_fit

from .plans import NO_GPU, resolved

RECIPE = ("qwen3_4b_lora", "peft=full", "hardware=hopper", "hardware.memory_gib=79.6", "parallelism=zero3")
IN_A_GROUP = ("hardware.gpus_per_node=2", "parallelism.sequence_group_size=2")


def longest(*words: str) -> LongestRow:
    recipe, *common = RECIPE
    row = longest_row(draft_run(recipe, [*common, *words], [], NO_GPU))
    assert row is not None
    return row


def test_the_longest_row_fits_and_a_longer_one_does_not() -> None:
    words = (*IN_A_GROUP, "activation=stored")
    row = longest(*words)
    fits = []
    for tokens in (row.tokens, row.tokens + 256):
        fits.append(tensors_fit(resolved(*RECIPE, *words, *row.overrides, f"packing.row_length={tokens}")))
    assert fits == [True, False]
    assert not row.has_all_positions


def test_where_nothing_fits_or_nothing_is_known() -> None:
    assert longest("hardware.memory_gib=8", "hardware.gpus_per_node=1", "activation=stored").tokens == 0
    offloaded = ("parallelism=zero2_offload", "hardware.gpus_per_node=2", "activation=stored")
    assert longest(*offloaded, "hardware.memory_gib=140", "hardware.host_memory_gib=40").tokens == 0
    unknown = ["model=a/b", "dataset=synthetic", "hardware=hopper", "hardware.gpus_per_node=1"]
    assert longest_row(draft_run(None, unknown, [], NO_GPU)) is None
