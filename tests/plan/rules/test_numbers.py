"""Every number of the schema has a range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import Field
from typing import Any, get_args, get_type_hints

import pytest

from tunebook.config import model_facts, schema
from tunebook.config.choices import PeftMethod, Source
from tunebook.config.ranges import demand, number
from tunebook.config.schema import MixturePart
from tunebook.errors import RulesError
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check

_SCHEMAS = [each for each in (*vars(schema).values(), model_facts.ModelFacts) if dataclasses.is_dataclass(each)]


def settings_with_numbers() -> Iterator[tuple[str, Field[Any]]]:
    """Every field of the schema that holds a number."""
    for kind in _SCHEMAS:
        hints = get_type_hints(kind)
        for each in dataclasses.fields(kind):
            kinds = {hints[each.name], *get_args(hints[each.name])}
            if {int, float} & kinds and not kinds & {bool, dict, list}:
                yield f"{kind.__name__}.{each.name}", each


@pytest.mark.parametrize("each", [pytest.param(each, id=name) for name, each in settings_with_numbers()])
def test_every_number_has_a_range(each):
    assert "limits" in each.metadata
    assert all(demand(each, value) for value in (math.nan, math.inf, -math.inf, 10**400, -(10**400)))


@pytest.mark.parametrize(
    ("limits", "value", "wanted"),
    [
        ({"at_least": 1}, 1, None),
        ({"at_least": 1}, 0, "at least 1"),
        ({"above": 0}, 0.0, "above 0"),
        ({"above": 0}, 1e-9, None),
        ({"at_least": 0, "below": 1}, 1.0, "below 1"),
        ({"at_least": 0, "at_most": 2**32 - 1}, 2**32, "at most 4,294,967,295"),
        ({"at_least": 0}, 10**400, "at most 1,000,000,000,000,000"),
    ],
)
def test_a_number_outside_its_range_is_told_the_limit(limits, value, wanted):
    assert demand(number(1, **limits), value) == wanted


def test_a_parts_numbers_have_ranges_too(sound, changed):
    parts = {"chat": MixturePart(path="a.jsonl", weight=-1.0), "code": MixturePart(path="b.jsonl", max_documents=0)}
    config = changed(sound, {"dataset.source": Source.mixture, "dataset.name": None, "dataset.parts": parts})
    keys = {problem.key for problem in check(config)}
    assert keys == {"dataset.parts.chat.weight", "dataset.parts.code.max_documents"}


def test_the_numbers_of_a_mapping_have_ranges_too(sound, changed):
    lora = changed(sound, {"peft.method": PeftMethod.lora})
    lora.peft.rank_pattern, lora.peft.alpha_pattern = {"q_proj": 0, "v_proj": [1]}, {"k_proj": -1.0}
    keys = {problem.key for problem in check(lora) if problem.id == "out-of-range"}
    assert keys == {"peft.rank_pattern.q_proj", "peft.rank_pattern.v_proj", "peft.alpha_pattern.k_proj"}


def test_numbers_are_refused_before_anything_is_decided_from_them(undecided, machine, changed):
    wrong = changed(undecided, {"training.max_length": 0, "hardware.reference.gpus_per_node": -1})
    with pytest.raises(RulesError) as error:
        resolve_auto(wrong, machine())
    assert {problem.key for problem in error.value.problems} == {
        "training.max_length",
        "hardware.reference.gpus_per_node",
    }
