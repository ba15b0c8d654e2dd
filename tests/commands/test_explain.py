"""`tunebook explain` prints why a rule exists."""

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


def test_all_lists_the_rules():
    assert explain("all").splitlines() == sorted(rule.id for rule in RULES)


def test_an_unknown_name_suggests_the_nearest_rule():
    with pytest.raises(RequestError, match=r"no rule 'bf16-on-volat'.*Did you mean 'bf16-on-volta'") as caught:
        explain("bf16-on-volat")
    assert caught.value.problem_id == "unknown-id"
