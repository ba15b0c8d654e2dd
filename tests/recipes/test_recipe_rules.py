"""Recipes under the rules, and numbers worked out by hand; tests/golden/plans.yaml has the plan of every recipe."""

from typing import Any

import pytest

from tunebook.config.book import find_recipes
from tunebook.config.choices import Attention, Compute, Generation, PackingMode
from tunebook.config.schema import RunConfig
from tunebook.data.batch import solve_batch
from tunebook.plan.memory import estimate_memory
from tunebook.plan.rules import check

from ..plan.plans import resolved

NAMES = list(find_recipes([]))


def errors(config: RunConfig) -> list[str]:
    return [problem.text() for problem in check(config) if problem.is_error]


def test_published_batch_comes_out_of_the_arithmetic() -> None:
    exact = solve_batch(resolved("qwen3b_zero2_exact"), None)
    assert (exact.world_size, exact.micro_batch_size, exact.accumulation) == (8, 11, 6)
    # 659,808 documents are 1,250 steps of at most 528, three times over
    assert exact.total_steps == 3750


@pytest.mark.nightly
def test_other_published_batches_come_out_of_the_arithmetic() -> None:
    two_nodes = solve_batch(resolved("llama2_70b_fsdp"), None)
    assert (two_nodes.world_size, two_nodes.rows_per_step, two_nodes.accumulation) == (16, 16, 1)
    one_node = solve_batch(resolved("llama2_70b_fsdp_1node"), None)
    assert (one_node.world_size, one_node.rows_per_step, one_node.accumulation) == (8, 16, 2)
    padded = solve_batch(resolved("zero1_lora", "packing=padded", "training.micro_batch_size=1"), None)
    assert (padded.world_size, padded.accumulation) == (4, 2)


def decided(name: str, *overrides: str) -> tuple[Any, ...]:
    config = resolved(name, *overrides)
    assert errors(config) == []
    return config.precision.compute, config.attention.implementation, config.packing.mode


@pytest.mark.nightly
def test_qwen3b_follows_the_machine_and_its_exact_twin_does_not() -> None:
    assert decided("qwen3b_zero2") == (Compute.fp32, Attention.sdpa_by_document, PackingMode.isolated)
    modern = (Compute.bf16, Attention.varlen_attention, PackingMode.isolated)
    assert decided("qwen3b_zero2", "hardware=hopper") == modern
    assert decided("qwen3b_zero2_exact") == (Compute.fp32, Attention.sdpa, PackingMode.padded)


@pytest.mark.nightly
def test_ddp_copy_of_llama3_is_120_gib_on_every_gpu() -> None:
    config = resolved("llama3_8b_ddp")
    assert config.model.facts is not None
    assert estimate_memory(config, config.model.facts).states_gib == pytest.approx(119.66, abs=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("generation", [g.name for g in Generation if g not in (Generation.auto, Generation.cpu)])
def test_one_gpu_recipe_runs_on_every_generation(generation: str) -> None:
    assert errors(resolved("qwen05b_single", f"hardware={generation}")) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("quickstart", "llama2"))])
def test_can_be_tried_without_a_hub_for_some_steps(name: str) -> None:
    words = ["model.weights=random", "dataset=synthetic", "training.max_steps=20", "schedule.warmup_steps=null"]
    assert errors(resolved(name, *words)) == []
