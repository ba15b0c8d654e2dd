"""From an answer to the program that is executed, as lm-evaluation-harness 0.4.13 makes it.

Source: `build_predictions` and `build_predictions_instruct` of its humaneval, `extract_code_blocks` of its mbpp. A test
holds them against those; `answer_to_fence` is our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

FENCE = "```"
_OPENING = re.compile(r"\A\s*(?:```\w*|python)[ \t]*\n")
_BLOCK = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)


def prompt_and_answer(problem: Mapping[str, Any], answer: str) -> str:
    """The answer goes on where the problem's prompt ends."""
    return str(problem["prompt"]) + answer


def prompt_and_answer_to_fence(problem: Mapping[str, Any], answer: str) -> str:
    """The same, where the answer was begun inside a code block: what follows the block is no program."""
    return str(problem["prompt"]) + answer.partition(FENCE)[0]


def answer_to_fence(problem: Mapping[str, Any], answer: str) -> str:
    """The answer, which was begun inside a code block, up to the block's end; a block that it opens anew is opened.

    Not of the harness: the answer's first word is never taken for the name of a language, unless a line ends with it.
    """
    return _OPENING.sub("", answer, count=1).partition(FENCE)[0]


def answer_alone(problem: Mapping[str, Any], answer: str) -> str:
    """The answer is the program."""
    return answer


def first_block(problem: Mapping[str, Any], answer: str) -> str:
    """The first code block of an answer that was begun inside one; empty where none is closed.

    The harness then looks again without the language's name; that finds nothing more, since it needs two fences.
    """
    found = _BLOCK.search(FENCE + answer)
    return found[1] if found else ""


BUILDERS: dict[str, Callable[[Mapping[str, Any], str], str]] = {
    "prompt_and_answer": prompt_and_answer,
    "prompt_and_answer_to_fence": prompt_and_answer_to_fence,
    "answer": answer_alone,
    "answer_to_fence": answer_to_fence,
    "first_block": first_block,
}
