"""Recipes without evidence: their cards say that they were not run, and the estimates on them are those of the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunebook.config.compose import compose
from tunebook.data.batch import solve_batch
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory.verdict import plan_memory
from tunebook.plan.show import about
from tunebook.plan.speed import plan_time

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MARK = "Estimated by `tunebook plan`, not measured: "
PLANNED = [card.parent.name for card in sorted(RECIPES.glob("*/README.md")) if MARK in card.read_text()]
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=16.0)


def card(recipe: str) -> str:
    return " ".join((RECIPES / recipe / "README.md").read_text().split())


def test_there_are_some() -> None:
    assert len(PLANNED) >= 8


@pytest.mark.parametrize("recipe", PLANNED)
def test_a_card_without_evidence_says_that_the_recipe_was_not_run(recipe: str) -> None:
    has_evidence = any((RECIPES / recipe / "evidence").glob("*.json"))
    assert ("This recipe has not been run" in card(recipe)) is not has_evidence


@pytest.mark.parametrize("recipe", PLANNED)
def test_the_estimates_on_a_card_are_those_of_the_plan(recipe: str) -> None:
    config = resolve_auto(compose(recipe, []).config, NO_GPU).config
    memory, time = plan_memory(config), plan_time(config, solve_batch(config, None))
    stated = f"{memory.total:.1f} GiB of {config.hardware.memory_gib:g} GiB"
    if time.tokens_per_second_per_gpu is not None:
        stated += f" and about {about(time.tokens_per_second_per_gpu)} tokens/s per GPU"
    text = card(recipe)
    assert MARK + stated in text
    for hours in re.findall(r"about ([\d.]+) hours for all", text):
        assert time.hours is not None and about(time.hours) == hours
