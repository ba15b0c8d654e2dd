"""Every rule, broken by the smallest change to a sound configuration."""

from __future__ import annotations

import re

import pytest

from tunebook.config.choices import ModelPart, PeftMethod, Weights
from tunebook.plan.rules import RULES, check

from .rule_cases import CASES, OF_IMAGES, SLURM


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}:{case.key}")
def test_a_change_breaks_its_rule(case, sound, changed):
    before = changed(sound, case.background)
    assert check(before) == [], "the background must be sound by itself"
    problems = check(changed(before, case.values))
    assert {problem.id for problem in problems} == {case.id}
    assert {problem.key for problem in problems} == {case.key}
    assert all(problem.message and problem.fix for problem in problems)


def test_every_rule_has_a_case_and_an_id_of_its_own():
    ids = [rule.id for rule in RULES]
    assert {*ids} == {case.id for case in CASES}
    assert len(ids) == len({*ids})
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", id) for id in ids)


def test_a_sound_configuration_breaks_nothing(sound):
    assert check(sound) == []


def test_all_problems_are_reported_together_and_errors_first(sound, changed):
    config = changed(sound, {
        "training.deterministic": True,
        "training.resume": "nvr",
        "training.global_tokens": 65536,
    })  # fmt: skip
    problems = check(config)
    assert [(problem.id, problem.is_error) for problem in problems] == [
        ("batch-one-way", True),
        ("resume-not-found", True),
        ("flash-attention-not-deterministic", False),
    ]


def test_a_problem_says_what_set_its_key(sound, changed):
    config = changed(sound, {"training.seed": 2**32})
    (problem,) = check(config, lambda key: f"override '{key}=...'")
    assert problem.text() == (
        "training.seed (from override 'training.seed=...'): must be at most 4,294,967,295, not 4294967296\n"
        "    fix: a number that is at most 4,294,967,295   [out-of-range]"
    )


def test_only_a_part_without_linear_layers_is_left_out_by_its_fix(sound, changed):
    (problem,) = check(changed(changed(sound, OF_IMAGES), {"model.train": [*ModelPart]}))
    assert problem.fix == "'model.train=[language,vision]', or peft=full"


def test_warnings_are_the_ones_a_run_can_live_with():
    warnings = {rule.id for rule in RULES if not rule.is_error}
    assert warnings == {"setting-ignored", "flash-attention-not-deterministic"}


def test_options_that_only_resemble_reserved_ones_are_the_users(sound, changed):
    args = ["--time-min=5", "--nodelist=node1", "--wait-all-nodes=1", "--ntasks-per-core=1", "-HC a100", "-w node1"]
    assert check(changed(sound, SLURM | {"launcher.extra_args": args})) == []


def test_random_weights_are_not_quantized(sound, changed):
    values = {"model.name": None, "model.path": "gptq", "peft.method": PeftMethod.lora}
    assert check(changed(sound, values | {"model.weights": Weights.random})) == []


def test_qlora_trains_over_its_own_quantizer(sound, changed):
    values = {"model.name": None, "model.path": "four_bit", "peft.method": PeftMethod.qlora}
    assert check(changed(sound, values)) == []
