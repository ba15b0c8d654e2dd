"""What is suggested for a plan that does not fit."""

from __future__ import annotations

from tunebook.plan.alternatives import suggest
from tunebook.plan.draft import draft_run

from .plans import NO_GPU

ON_AMPERE = ["hardware=ampere", "model.compile_layers=false", "packing.row_length=1024", "training.max_length=1024"]
ON_A_SMALL_GPU = [*ON_AMPERE, "hardware.gpus_per_node=1", "hardware.memory_gib=24", "parallelism=single"]


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
    assert "parallelism=fsdp" in suggested("llama3_8b_ddp", *ON_AMPERE, "hardware.memory_gib=40")


def test_the_least_memory_is_named_if_nothing_fits() -> None:
    words = [*ON_A_SMALL_GPU, "activation=checkpointing", "hardware.memory_gib=1"]
    assert [fits for fits, _ in suggested("qwen3b_zero2", *words).values()] == [False]
