"""What is suggested for a plan that does not fit."""

from __future__ import annotations

from tunebook.plan.alternatives import suggest
from tunebook.plan.draft import draft_run

from .plans import NO_GPU

ON_A_SMALL_GPU = ["hardware=ampere", "hardware.gpus_per_node=1", "hardware.memory_gib=24", "parallelism=single"]


def suggested(recipe: str, *words: str) -> dict[str, tuple[bool, float]]:
    found = suggest(draft_run(recipe, list(words), [], NO_GPU))
    return {" ".join(each.overrides): (each.fits, round(each.total_gib)) for each in found}


def test_all_that_fit_are_suggested() -> None:
    """3 billion parameters: their states alone take 46 GiB. Recomputing does not help, and `lora` would do."""
    found = suggested("qwen3b_zero2", *ON_A_SMALL_GPU)
    assert {words: fits for words, (fits, _) in found.items()} == {
        "parallelism=fsdp_offload": True, "peft=lora": True, "peft=qlora": True,
    }  # fmt: skip


def test_with_several_gpus_states_are_divided() -> None:
    assert "parallelism=fsdp" in suggested("llama3_8b_ddp", "hardware=ampere", "hardware.memory_gib=40")
    zero = suggested("llama3_8b_ddp", "hardware=ampere", "hardware.memory_gib=40", "parallelism=zero1")
    assert "parallelism=zero3" in zero  # which knows the settings typed for ZeRO


def test_the_least_memory_is_named_if_nothing_fits() -> None:
    words = ("hardware=ampere", "hardware.gpus_per_node=1", "hardware.num_nodes=1", "hardware.memory_gib=2")
    assert suggested("llama2_70b_fsdp", *words) == {"parallelism=fsdp_offload": (False, 10)}


def test_what_changes_nothing_is_skipped() -> None:
    words = [*ON_A_SMALL_GPU, "activation=checkpointing", "peft=qlora", "hardware.memory_gib=2"]
    found = suggest(draft_run("qwen3b_zero2", words, [], NO_GPU))
    assert [each.overrides for each in found] not in ([["activation=checkpointing"]], [["peft=qlora"]])


def test_rows_are_halved_together_with_their_documents() -> None:
    words = (*ON_A_SMALL_GPU, "peft=lora", "activation=stored", "training.max_length=8192", "packing.row_length=8192")
    assert "training.max_length=4096 packing.row_length=4096" in suggested("qwen05b_single", *words)
