"""Every rule, broken by words that a user may type after a recipe: exit code and problem ids, in `refusals.yaml`."""

from __future__ import annotations

from typing import Any

from tests.golden.record import check, read
from tunebook.hardware.detect import Machine
from tunebook.plan.draft import draft_json, draft_run
from tunebook.plan.rules import RULES

from ..plan.rules.conftest import in_a_folder_with_models  # noqa: F401

NO_GPU = Machine(gpus=[], driver=None, num_cpus=8, host_memory_gib=32.0)


def answer(usual: list[str], typed: str) -> dict[str, Any]:
    """The exit code and the ids for words after `usual`: its recipe and its overrides of other keys."""
    words = typed.split(" ")
    recipe = words.pop(0) if words and "=" not in words[0] else None
    if recipe is None:
        recipe, *others = usual
        keys = {word.partition("=")[0] for word in words}
        words = [word for word in others if word.partition("=")[0] not in keys] + words
    draft = draft_run(recipe, words, [], NO_GPU)
    ids = dict.fromkeys(problem["id"] for problem in draft_json(draft)["problems"])
    return {"words": typed, "exit": draft.exit_code, "ids": " ".join(ids)}


def test_refusals() -> None:
    recorded = read("refusals")
    usual = recorded["usual"].split(" ")
    rows = {row: answer(usual, content["words"]) for row, content in recorded["rows"].items()}
    check("refusals", {"usual": recorded["usual"], "rows": rows})


def test_every_rule_is_in_the_table() -> None:
    rows = read("refusals")["rows"]
    assert {rule.id for rule in RULES} <= rows.keys()
    assert [rule.id for rule in RULES if rule.id not in rows[rule.id]["ids"].split()] == []
