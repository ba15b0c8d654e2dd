"""Names of parameters in short, for no parameter more and none less."""

from __future__ import annotations

import re

from tunebook.config.unreached import as_patterns, expression, stand_for

LAYERS = [f"model.layers.{number}.{part}" for number in range(12) for part in ("gate.weight", "gate.bias", "up.weight")]
TOWER = [f"model.tower.layers.{number}.fc.weight" for number in range(3)] + ["model.tower.norm.weight"]
EVERYTHING = ["model.embed.weight", *LAYERS, *TOWER, "head.weight"]


def test_a_module_stands_for_all_that_is_in_it():
    assert as_patterns({*TOWER}, EVERYTHING) == ["model.tower"]
    assert as_patterns({*EVERYTHING[:-1]}, EVERYTHING) == ["model"]
    assert as_patterns(set(), EVERYTHING) == []


def test_layers_that_are_alike_share_a_pattern():
    biases = {name for name in LAYERS if name.endswith("bias")}
    assert as_patterns(biases, EVERYTHING) == ["model.layers.*.gate.bias"]
    all_but_one = biases - {"model.layers.7.gate.bias"}
    assert as_patterns(all_but_one, EVERYTHING) == sorted(all_but_one)


def test_patterns_stand_for_what_they_were_made_of_and_nothing_else():
    unreached = {*TOWER[:1], *(name for name in LAYERS if ".gate." in name)}
    patterns = as_patterns(unreached, EVERYTHING)
    assert {name for name in EVERYTHING if stand_for(patterns, name)} == unreached
    assert not stand_for([], "model.embed.weight")


def test_a_part_of_a_name_is_not_that_part():
    assert not stand_for(["model.tower"], "model.tower_of_sound.weight")
    assert not stand_for(["model.layers.*.gate"], "model.layers.1.gated.weight")
    assert not stand_for(["model.layers.*.gate"], "modelXlayers.1.gate.weight")
    assert re.fullmatch(expression(["model.tower"]), "model.tower")  # the module itself, as PEFT asks for it
