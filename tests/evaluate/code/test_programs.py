"""From answers to programs, against the functions of the installed harness, which are read and not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunebook.evaluate.code.programs import BUILDERS

PROBLEM = {"prompt": "def f(x):\n"}
ANSWERS = [
    "    return x\n",
    "",
    "    return x\n```",
    "    return x\n```\nIt returns x. ```python\nf(1)\n```",
    "```",
    "```python\nreturn\n```",
    "python\ndef f(x):\n    return x\n```\nDone.",
    "def f(x):\n    return x\n",
    "def f(x): return x```",
    "\n\n```\n",
    "a ``` b ```python c ``` d",
    "``` x ```python\ny\n``` ```z```",
    "one `two` ``three``",
    "```py\nx = '```'\n```",
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize(
    ("kind", "task", "function"),
    [
        ("prompt_and_answer", "humaneval", "build_predictions"),
        ("prompt_and_answer_to_fence", "humaneval", "build_predictions_instruct"),
        ("first_block", "mbpp", "build_predictions"),
    ],
)
def test_the_program_is_the_harness_own(
    kind: str, task: str, function: str, answer: str, harness_function: Callable[[str, str], Callable[..., Any]]
) -> None:
    [[program]] = harness_function(task, function)([[answer]], [PROBLEM])
    assert BUILDERS[kind](PROBLEM, answer) == program


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("def f(x):\n    return x\n```\nIt returns x.", "def f(x):\n    return x\n"),
        ("def f(x): return x", "def f(x): return x"),  # cut before the block's end
        ("\n\nimport re\n```\n```python\nno\n```", "\n\nimport re\n"),
        ("```python\nx = 1\n```", "x = 1\n"),
        (" \n``` \nx = 1\n```", "x = 1\n"),
        ("python\nx = 1\n```", "x = 1\n"),
        ("python = 1\n```", "python = 1\n"),
        ("```", ""),
    ],
)
def test_up_to_the_end_of_the_block(answer: str, program: str) -> None:
    assert BUILDERS["answer_to_fence"](PROBLEM, answer) == program


def test_by_hand() -> None:
    answer = "    return x\n```\nDone."
    assert BUILDERS["prompt_and_answer"](PROBLEM, answer) == "def f(x):\n    return x\n```\nDone."
    assert BUILDERS["prompt_and_answer_to_fence"](PROBLEM, answer) == "def f(x):\n    return x\n"
    assert BUILDERS["answer"](PROBLEM, answer) == answer
    assert BUILDERS["first_block"](PROBLEM, "python\nx = 1\n```") == "x = 1"
    assert BUILDERS["first_block"](PROBLEM, "x = 1\n") == ""
