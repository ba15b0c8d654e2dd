"""`tunebook explain` prints why a rule exists and what a setting means."""

from __future__ import annotations

import pytest

from tunebook.commands.explain import explain
from tunebook.errors import RequestError
from tunebook.plan.rules import RULES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_says_what_it_refuses_and_why(rule):
    heading, why = explain(rule.id).split("\n\n", 1)
    assert heading == (f"{rule.id} ({rule.key})" if rule.key else rule.id)
    assert why.startswith(("Refuse ", "Require ", "Allow ") if rule.is_error else "Warn ")


def test_a_setting_has_its_default_values_and_unit():
    key, _, facts = explain("training.max_steps").splitlines()
    assert key == "training.max_steps"
    assert facts.split("; ") == ["    default: null", "values: whole number >= 1 optimizer steps, null"]


def test_a_group_has_its_choices_and_its_settings():
    text = explain("optimizer")
    assert "\n  muon: " in text and "\noptimizer.beta1\n" in text


def test_all_lists_groups_and_rules():
    listed = [line.strip().partition(":")[0] for line in explain("all").splitlines()]
    assert {"training", "dataset.synthetic", "bf16-on-volta"} <= set(listed)


def test_a_value_is_explained_by_its_setting():
    assert explain("optimizer=adamw") == explain("optimizer")
    assert explain("training.max_steps=3") == explain("training.max_steps")


def test_a_choice_is_explained_with_its_group():
    assert explain("lora") == "  peft=lora: Low-rank adapters on a frozen base"


def test_a_name_of_another_tool_is_answered():
    assert explain("lora_r") == "lora_r is peft.rank: type peft=lora peft.rank=16"
    assert explain("pref_loss=ipo").endswith(": type method=dpo method.loss_type=ipo")
    assert explain("rl") == "there is no key 'rl': type method=dpo"


@pytest.mark.parametrize(
    ("word", "near"), [("bf16-on-volat", "bf16-on-volta"), ("training.global_sampels", "training.global_samples")]
)
def test_an_unknown_name_suggests_the_nearest(word, near):
    with pytest.raises(RequestError, match=f"Did you mean '{near}'") as caught:
        explain(word)
    assert caught.value.problem_id == "unknown-id"
