"""Every number of the schema has a range, and a value to type instead that lies in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import get_args, get_type_hints

import pytest

from tunebook.config.choices import (
    Generation,
    PeftMethod,
    Source,
)
from tunebook.config.ranges import MAPPING_RANGES, RANGES
from tunebook.config.schema import (
    FsdpConfig,
    MixturePart,
    RayConfig,
    RunConfig,
    SlurmConfig,
    ZeroConfig,
)
from tunebook.errors import RulesError
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check, numbers
from tunebook.plan.rules.frame import read_key


def numeric_keys(kind: type, prefix: str = "") -> Iterator[str]:
    """Every key of a schema that holds a number."""
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        if each.metadata.get("omegaconf_ignore"):  # no setting
            continue
        members = [member for member in (get_args(hints[each.name]) or (hints[each.name],)) if isinstance(member, type)]
        key = prefix + each.name
        if any(dataclasses.is_dataclass(member) for member in members) and each.name != "parts":
            for member in members:
                if dataclasses.is_dataclass(member):
                    yield from numeric_keys(member, f"{key}.")
        elif {int, float} & set(members) and bool not in members:
            yield key


def test_every_number_of_the_schema_has_a_range():
    keys = set(numeric_keys(RunConfig))
    for kind, group in (
        (ZeroConfig, "parallelism"),
        (FsdpConfig, "parallelism"),
        (SlurmConfig, "launcher"),
        (RayConfig, "launcher"),
    ):
        keys |= set(numeric_keys(kind, f"{group}."))
    known = {each.key for each in (*RANGES, *MAPPING_RANGES)}
    assert known == keys


@pytest.mark.parametrize("each", [*RANGES, *MAPPING_RANGES], ids=lambda each: each.key)
def test_the_value_a_range_suggests_lies_in_it(each):
    assert each.usual == "null" or each.holds(float(each.usual))
    assert not each.holds(math.nan)
    assert not each.holds(math.inf)


def test_a_parts_numbers_have_ranges_too(sound, changed):
    parts = {"chat": MixturePart(path="a.jsonl", weight=-1.0), "code": MixturePart(path="b.jsonl", max_documents=0)}
    config = changed(sound, {"dataset.source": Source.mixture, "dataset.name": None, "dataset.parts": parts})
    keys = {problem.key for problem in check(config)}
    assert keys == {"dataset.parts.chat.weight", "dataset.parts.code.max_documents"}


def test_the_numbers_of_a_mapping_have_ranges_too(sound, changed):
    lora = {"peft.method": PeftMethod.lora, "peft.rank_pattern": {"q_proj": 0}, "peft.alpha_pattern": {"k_proj": -1.0}}
    problems = {problem.key: problem.fix for problem in check(changed(sound, lora))}
    assert problems == {
        "peft.rank_pattern.q_proj": "peft.rank_pattern.q_proj=16",
        "peft.alpha_pattern.k_proj": "peft.alpha_pattern.k_proj=32",
    }


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, math.inf, math.nan])
@pytest.mark.parametrize(
    "key", ["training.global_tokens", "packing.row_length", "peft.rank", "model.facts.num_parameters", "peft.alpha"]
)
def test_no_plan_is_worked_out_from_absurd_numbers(sound, key, value):
    parent, name = key.rsplit(".", 1)
    setattr(read_key(sound, parent), name, value)
    with pytest.raises(RulesError, match=key):
        numbers.refuse_absurd(sound)


def test_numbers_that_are_only_wrong_are_left_to_the_rule(sound):
    sound.peft.rank = 0
    sound.training.num_epochs = 2e6
    numbers.refuse_absurd(sound)
    assert {problem.key for problem in check(sound)} == {"peft.rank", "training.num_epochs"}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("training.max_length", (0, -1, 1)),
        ("hardware.reference.gpus_per_node", (0, -1, 100_000)),
        ("hardware.reference.memory_gib", (0.0, -1.0)),
    ],
)
def test_what_is_worked_out_from_a_wrong_number_is_not_refused_beside_it(undecided, machine, changed, key, values):
    undecided.hardware.reference.generation = Generation.hopper
    for value in values:
        resolved = resolve_auto(changed(undecided, {key: value}), machine()).config
        assert {problem.key for problem in check(resolved)} == {key}
