"""The commands for a GPU machine are right before a GPU is used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tunebook.config.book import book_root
from tunebook.config.compose import compose
from tunebook.evidence.files import read_evidence
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check

from ..evidence.conftest import machine_of

sys.path.insert(0, str(Path(__file__).parent))

from container_runs import CASES, Case, run


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.training])
def test_a_training_composes_without_a_problem(name: str) -> None:
    recipe, *overrides = CASES[name].training
    composed = compose(recipe, overrides).config
    gpus = 2 if composed.hardware.gpus_per_node == 2 else 1
    evidence = read_evidence(
        book_root() / "recipes" / "qwen3b_zero2" / "evidence" / f"hopper-{gpus}-random_weights.json"
    )
    if any("book:inputs/" in word for word in overrides):  # a clone has no inputs before make_inputs.py was run
        return
    config = resolve_auto(composed, machine_of(evidence.hardware)).config
    assert [problem.message for problem in check(config) if problem.is_error] == []


def test_a_line_says_whether_the_exit_code_was_right_and_how_the_output_ended(tmp_path: Path) -> None:
    case = Case(["sh", "-c", "seq 20; nvidia-smi; exit 2"], code=2, stands_in={"nvidia-smi": "#!/bin/sh\necho old\n"})
    line = run("refused", case, tmp_path, timeout_s=20)
    assert (line["exit_code"], line["is_right"], line["stands_in"]) == (2, True, ["nvidia-smi"])
    assert line["output"] == [*map(str, range(10, 21)), "old"]
    slow = run("slow", Case(["sleep", "60"]), tmp_path, timeout_s=0.2)
    assert (slow["exit_code"], slow["is_right"]) == (None, False)
