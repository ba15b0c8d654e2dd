"""Every recipe under the rules: sound on the machine of its source, and decided as the book says on others."""

from typing import Any

import pytest

from tunebook.config.book import find_recipes
from tunebook.config.choices import Attention, Checkpointing, Compute, Generation, PackingMode
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.data.batch import solve_batch
from tunebook.plan.memory import estimate_memory
from tunebook.plan.memory.verdict import plan_memory
from tunebook.plan.rules import check

from ..plan.plans import resolved

NAMES = list(find_recipes([]))


def errors(config: RunConfig) -> list[str]:
    return [problem.text() for problem in check(config) if problem.is_error]


@pytest.mark.parametrize("name", NAMES)
def test_breaks_no_rule_and_earns_no_warning_on_the_machine_of_its_source(name: str) -> None:
    assert [problem.text() for problem in check(resolved(name))] == []


@pytest.mark.parametrize("name", NAMES)
def test_is_planned_for_the_machine_of_its_source(name: str) -> None:
    hardware = resolved(name).hardware
    assert hardware.generation is hardware.reference.generation
    assert hardware.gpus_per_node == hardware.reference.gpus_per_node


@pytest.mark.parametrize("name", NAMES)
def test_its_batch_can_be_solved_before_the_data_is_there(name: str) -> None:
    plan = solve_batch(resolved(name), None)
    assert plan.world_size == resolved(name).hardware.num_nodes * (resolved(name).hardware.gpus_per_node or 0)


@pytest.mark.parametrize("name", NAMES)
def test_model_states_leave_room_on_the_machine_of_its_source(name: str) -> None:
    config = resolved(name)
    assert config.model.facts is not None and config.hardware.memory_gib is not None
    # what is gathered at a time is among the states; the rest is the CUDA context and recomputed activations
    assert estimate_memory(config, config.model.facts).states_gib < 0.95 * config.hardware.memory_gib


def test_published_batches_come_out_of_the_arithmetic() -> None:
    exact = solve_batch(resolved("qwen3b_zero2_exact"), None)
    assert (exact.world_size, exact.micro_batch_size, exact.accumulation) == (8, 11, 6)
    two_nodes = solve_batch(resolved("llama2_70b_fsdp"), None)
    assert (two_nodes.world_size, two_nodes.rows_per_step, two_nodes.accumulation) == (16, 16, 1)
    one_node = solve_batch(resolved("llama2_70b_fsdp_1node"), None)
    assert (one_node.world_size, one_node.rows_per_step, one_node.accumulation) == (8, 16, 2)
    padded = solve_batch(resolved("zero1_lora", "packing=padded", "training.micro_batch_size=1"), None)
    assert (padded.world_size, padded.accumulation) == (4, 2)


def test_published_run_takes_its_number_of_steps() -> None:
    # 659,808 documents are 1,250 steps of at most 528, three times over
    assert solve_batch(resolved("qwen3b_zero2_exact"), None).total_steps == 3750


def decided(name: str, *overrides: str) -> tuple[Any, ...]:
    config = resolved(name, *overrides)
    assert errors(config) == []
    return config.precision.compute, config.attention.implementation, config.packing.mode


def test_qwen3b_follows_the_machine_and_its_exact_twin_does_not() -> None:
    assert decided("qwen3b_zero2") == (Compute.fp32, Attention.sdpa_by_document, PackingMode.isolated)
    modern = (Compute.bf16, Attention.varlen_attention, PackingMode.isolated)
    for hardware in ("hardware=ampere", "hardware=hopper"):
        assert decided("qwen3b_zero2", hardware) == modern
        assert resolved("qwen3b_zero2", hardware).model.compile_layers is True
    assert resolved("qwen3b_zero2").model.compile_layers is False
    assert decided("qwen3b_zero2_exact") == (Compute.fp32, Attention.sdpa, PackingMode.padded)
    assert resolved("qwen3b_zero2_exact").activation.checkpointing is Checkpointing.enabled


def test_llama2_computes_in_bf16_with_flash_attention_as_its_source_did() -> None:
    assert decided("llama2_70b_fsdp") == (Compute.bf16, Attention.varlen_attention, PackingMode.isolated)
    assert resolved("llama2_70b_fsdp").model.compile_layers is True
    assert decided("llama2_70b_fsdp_1node") == (Compute.bf16, Attention.flash_attention_2, PackingMode.isolated)
    assert resolved("llama2_70b_fsdp_1node").model.compile_layers is False  # its weights are on the host
    assert resolved("llama2_70b_fsdp").activation.checkpointing is Checkpointing.enabled


def test_paged_adamw_of_the_llama2_source_is_refused_under_fsdp() -> None:
    for name in ("llama2_70b_fsdp", "llama2_70b_fsdp_1node"):
        (problem,) = check(resolved(name, "optimizer=paged_adamw_32bit"))
        assert problem.id == "optimizer-with-fsdp"


def test_fp8_runs_on_its_source_s_machine_and_not_under_deepspeed() -> None:
    config = resolved("llama3_8b_fp8")
    assert check(config) == []
    assert (config.model.compile_layers, config.attention.implementation) == (True, Attention.varlen_attention)
    (problem,) = [found for found in check(resolved("llama3_8b_fp8", "parallelism=zero3")) if found.is_error]
    assert problem.id == "fp8-with-deepspeed"


@pytest.mark.parametrize("name", NAMES)
def test_no_recipe_is_too_large_for_the_machine_it_was_published_on(name: str) -> None:
    # 120 GiB of states on each of 180, and 71 of 80, of which nobody has said that they fit (their sources say that
    # they must; that of the latter pages its optimizer's state out).
    assert plan_memory(resolved(name)).fits is (None if name in {"llama3_8b_ddp", "llama2_70b_fsdp"} else True)


def test_ddp_copy_of_llama3_is_120_gib_on_every_gpu() -> None:
    config = resolved("llama3_8b_ddp")
    assert config.model.facts is not None
    assert estimate_memory(config, config.model.facts).states_gib == pytest.approx(119.66, abs=0.01)


@pytest.mark.parametrize("generation", [g.name for g in Generation if g not in (Generation.auto, Generation.cpu)])
def test_one_gpu_recipe_runs_on_every_generation(generation: str) -> None:
    assert errors(resolved("qwen05b_single", f"hardware={generation}")) == []


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("quickstart", "llama2"))])
def test_can_be_tried_without_a_hub_for_some_steps(name: str) -> None:
    words = ["model.weights=random", "dataset=synthetic", "training.max_steps=20"]
    if compose(name, []).config.schedule.warmup_steps:
        words.append("schedule.warmup_steps=2")
    assert errors(resolved(name, *words)) == []


def test_command_for_a_trial_of_the_one_gpu_recipe_runs_as_it_is() -> None:
    words = ("model.weights=random", "dataset=synthetic", "training.max_steps=20")
    assert errors(resolved("qwen05b_single", *words)) == []
    assert errors(resolved("qwen05b_single", *words, "hardware=hopper")) == []
