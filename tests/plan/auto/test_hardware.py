"""The machine that is meant where none is named, in words that are true of a request without a recipe too."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Generation, Strategy
from tunebook.plan.auto.resolve import resolve_auto


@pytest.mark.parametrize(
    ("recipe", "generation", "gpus"),
    [
        (None, "no GPU is found here", "one process uses every CPU core"),
        (
            "quickstart",
            "no GPU is found here, and a CPU is what the recipe is planned for",
            "ranks of the machine that the recipe is planned for",
        ),
    ],
)
def test_a_model_of_ones_own_was_published_on_nothing(undecided, machine, recipe, generation, gpus) -> None:
    undecided.recipe = recipe
    undecided.parallelism.strategy = Strategy.ddp
    whys = {choice.key: choice.why for choice in resolve_auto(undecided, machine()).choices}
    assert (whys["hardware.generation"], whys["hardware.gpus_per_node"]) == (generation, gpus)


def test_without_a_recipe_planned_gpus_are_those_of_the_reference_that_was_typed(undecided, machine) -> None:
    undecided.parallelism.strategy = Strategy.ddp
    undecided.hardware.reference.generation = Generation.hopper
    undecided.hardware.reference.gpus_per_node = 8
    undecided.hardware.reference.memory_gib = 140.4
    whys = {choice.key: choice.why for choice in resolve_auto(undecided, machine()).choices}
    assert whys["hardware.generation"] == "no GPU is found here; planned for the machine of hardware.reference"
    assert whys["hardware.gpus_per_node"] == "GPUs of the machine of hardware.reference"
    assert whys["hardware.memory_gib"] == "of the machine of hardware.reference"


def test_without_any_reference_one_gpu_is_planned_for_and_how_to_plan_for_more_is_said(undecided, machine) -> None:
    undecided.parallelism.strategy = Strategy.ddp
    undecided.hardware.generation = Generation.hopper
    whys = {choice.key: choice.why for choice in resolve_auto(undecided, machine()).choices}
    assert whys["hardware.gpus_per_node"] == "no setting asks for more; hardware.gpus_per_node=8 plans for 8"
