"""Modules that hold exactly the parameters that text does not reach."""

from __future__ import annotations

import re

import pytest

from tunebook.config.choices import ModelPart, PeftMethod
from tunebook.config.model_facts import frozen_modules, is_in_modules, modules_pattern, outermost_modules
from tunebook.model.parameters import count_parameters

from ..plan.memory.layers import measured as traced

LAYERS = [f"model.layers.{number}.{part}" for number in range(12) for part in ("gate.weight", "gate.bias", "up.weight")]
TOWER = [f"model.tower.layers.{number}.fc.weight" for number in range(3)] + ["model.tower.norm.weight"]
WITH_TOWER = traced(
    num_layers=24, parameters=300_000_000, adapters={"up": [24, 976]},
    unreached_parameters=1_234_567,
)  # fmt: skip
EVERYTHING = ["model.embed.weight", *LAYERS, *TOWER, "head.weight"]


def test_a_module_stands_for_all_its_parameters():
    assert outermost_modules({*TOWER}, EVERYTHING) == ["model.tower"]
    assert outermost_modules({*EVERYTHING[:-1]}, EVERYTHING) == ["model"]
    assert outermost_modules(set(), EVERYTHING) == []


def test_modules_hold_exactly_their_parameters():
    unreached = {*TOWER[:1], *(name for name in LAYERS if ".gate." in name), "model.layers.1.up.weight"}
    modules = outermost_modules(unreached, EVERYTHING)
    assert {name for name in EVERYTHING if is_in_modules(modules, name)} == unreached
    matched = [name for name in EVERYTHING if re.fullmatch(modules_pattern(modules), name)]
    assert set(matched) == unreached
    assert not is_in_modules([], "model.embed.weight")


def test_part_of_a_name_is_another_module():
    assert not is_in_modules(["model.tower"], "model.tower_of_sound.weight")
    assert not re.fullmatch(modules_pattern(["model.tower"]), "modelXtower.weight")
    assert re.fullmatch(modules_pattern(["model.tower"]), "model.tower")  # the module itself, as PEFT asks for it


@pytest.mark.parametrize(
    ("trained", "frozen"),
    [
        (["language"], {"model.visual.block.weight", "model.visual.merger.mlp.weight", "model.visual"}),
        (["language", "projector"], {"model.visual.block.weight", "model.visual"}),
        (["language", "vision"], {"model.visual.merger.mlp.weight"}),
        (["projector"], {"model.visual.block.weight", "model.visual", "model.layers.0.weight", "lm_head.weight"}),
        (["language", "vision", "projector"], set()),
    ],
)
def test_parts_that_are_not_named_are_frozen(trained, frozen):
    names = ["model.visual.block.weight", "model.visual.merger.mlp.weight", "model.visual", "model.layers.0.weight"]
    pattern = frozen_modules(["model.visual"], [ModelPart[part] for part in trained])
    assert {name for name in [*names, "lm_head.weight"] if pattern and re.fullmatch(pattern, name)} == frozen
    assert frozen_modules([], [ModelPart.language]) is None


def test_it_is_counted_among_what_is_frozen(undecided):
    facts = undecided.model.facts
    facts.measured = WITH_TOWER
    found = count_parameters(undecided, facts)
    assert (found.trained, found.frozen) == (494_032_768 - 1_234_567, 1_234_567)
    undecided.peft.method, undecided.peft.rank = PeftMethod.lora, 8
    adapted = count_parameters(undecided, facts)
    assert (adapted.trained, adapted.frozen) == (8 * 1000, 494_032_768)
