"""What is suggested for a plan that does not fit."""

from __future__ import annotations

from tunebook.plan.alternatives import suggest
from tunebook.plan.draft import draft_run

from .plans import NO_GPU

ON_AMPERE = ["hardware=ampere", "model.compile_layers=false", "packing.row_length=1024", "training.max_length=1024"]
ON_A_SMALL_GPU = [*ON_AMPERE, "hardware.gpus_per_node=1", "hardware.memory_gib=24", "parallelism=single"]


def suggested(recipe: str, *words: str) -> dict[str, bool | None]:
    found = suggest(draft_run(recipe, list(words), [], NO_GPU))
    return {typed: draft.fits for typed, draft in found.items()}


def test_all_that_fit_are_suggested() -> None:
    """3 billion parameters: their states alone take 46 GiB. Recomputing does not help, and `lora` would do."""
    found = suggested("qwen3b_zero2", *ON_A_SMALL_GPU)
    assert found == {"parallelism=fsdp_offload": True, "peft=lora": True, "peft=qlora": True}


def test_with_several_gpus_states_are_divided() -> None:
    assert "parallelism=fsdp" in suggested("llama3_8b_ddp", *ON_AMPERE, "hardware.memory_gib=40")


def test_the_least_memory_is_named_if_nothing_fits() -> None:
    words = [*ON_A_SMALL_GPU, "activation=checkpointing", "hardware.memory_gib=1"]
    assert [*suggested("qwen3b_zero2", *words).values()] == [False]


def test_zero3_is_suggested_where_fsdp_is_refused() -> None:
    words = [*ON_AMPERE, "hardware.memory_gib=40", "parallelism=auto", "optimizer.name=adamw_8bit"]
    draft = draft_run("llama3_8b_ddp", words, [], NO_GPU)
    assert draft.resolved.choice("parallelism.strategy").value == "ddp" and draft.fits is False
    assert "nothing that was tried is sure to fit" in draft.resolved.choice("parallelism.strategy").why
    assert "parallelism=zero3" in suggest(draft)
