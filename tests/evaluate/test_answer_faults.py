"""Answers of each kind by hand, and right answers that look like them."""

from __future__ import annotations

import pytest

from tunebook.evaluate.answer_faults import count_faults, find_faults
from tunebook.evaluate.results import Answer

PROSE = (
    "The river rises in the hills north of the town and runs for forty miles to the sea. Along its banks there are "
    "mills, most of them built before the railway came. Two of them still work, and one sells its flour on Saturdays. "
)
CODE = """Here is the function:

```python
def has_close_elements(numbers, threshold):
    for index, one in enumerate(numbers):
        for other in numbers[index + 1:]:
            if abs(one - other) < threshold:
                return True
    return False
```
"""
TABLE = "| year | mills | flour |\n|---|---|---|\n" + "".join(f"| {1900 + n} | {n * 7 % 13} | 0 |\n" for n in range(60))
LIST = "The steps are:\n\n" + "".join(
    f"{number}. {step}\n"
    for number, step in enumerate(["Open the box", "Take out the part", "Turn it", "Put it back", "Close the box"], 1)
)

RIGHT = {
    "yes": "yes",
    "number": "42",
    "letter": "A",
    "letter in a sentence": "The answer is A",
    "decimals": "0.0 0.0 0.0 0.0",
    "word list": "chair key rain",
    "prose": PROSE.strip(),
    "prose without a full stop": "Paris is the capital of France",
    "list": LIST,
    "list of short words": "- a\n- b\n- c\n- d\n- e\n- f\n- g\n- h\n",
    "code": CODE,
    "code in one line": "Use ```x = 1``` for that",
    "table": TABLE,
    "zeros": "[" + ", ".join(["0"] * 64) + "]",
    "laughter": "Ha ha ha ha! Very funny.",
    "rhyme": "Row, row, row your boat gently down the stream. Merrily, merrily, merrily, merrily, life is but a dream.",
    "thought": "<think>Seven times six is forty-two, of course.</think>42",
    "json": '{"name": "mill", "open": ["Saturday", "Sunday"]}',
    "long prose": PROSE + PROSE[::-1] + "".join(f"Mill {n} was built by family {n * 37}. " for n in range(20)),
    "chinese": "\u6cb3\u6d41\u53d1\u6e90\u4e8e\u57ce\u5317\u7684\u5c71\u4e18\u3002",
}  # fmt: skip


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT.keys())
@pytest.mark.parametrize("finish", ["eos", "stop", None])
def test_a_right_answer_has_no_fault(text: str, finish: str | None) -> None:
    assert find_faults(text, finish) == set()


@pytest.mark.parametrize("text", ["", " \n\t", "<think>Nothing to say.</think>\n", "</think>"])
def test_empty(text: str) -> None:
    assert find_faults(text, "eos") == {"empty"}


LOOPS = {
    "sentence": PROSE + "I hope this helps you. " * 20,
    "line": PROSE + "\n" + "print(x)\n" * 30,
    "word": "The answer is " + "yes " * 20,
    "two words": "no no yes no " * 12,
    "long run": (PROSE + "\n") * 6,
    "without blanks": "eleven" * 30,
    "chinese": "\u6211\u4e0d\u77e5\u9053\u3002" * 20,
    "counted lines": "".join(f"Step {n // 4}: go on.\n" for n in range(400)),
    "cut within a repeat": "Let us see. " * 20 + "Let us",
}


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS.keys())
def test_looping(text: str) -> None:
    assert "looping" in find_faults(text, "eos")


def test_numbers_alone_loop_only_if_they_have_no_end() -> None:
    zeros = "0 " * 100
    assert find_faults(zeros, "eos") == set()
    assert find_faults(zeros, "length") == {"looping", "endless", "abrupt"}


def test_a_loop_in_the_middle_is_none() -> None:
    assert find_faults("ho " * 18 + PROSE + PROSE.upper(), "eos") == set()


@pytest.mark.parametrize(
    ("text", "is_abrupt"),
    [
        (PROSE.strip(), False),
        (PROSE + "One of them was", True),
        (CODE, False),
        (CODE[:120], True),
        ("| year | mills |\n| 1900 |", False),
        ("The mills are:\n", False),
    ],
)
def test_the_limit_within_a_sentence(text: str, is_abrupt: bool) -> None:
    assert find_faults(text, "length") == {"endless"} | ({"abrupt"} if is_abrupt else set())


@pytest.mark.parametrize(
    "text",
    [
        CODE.removesuffix("```\n"),
        "<think>Seven times six is",
        PROSE + "One of them,",
        PROSE + "One of them was built by the",
        PROSE + "It was re-",
        PROSE + "It has two wheels (",
    ],
)
def test_the_model_ended_within_something(text: str) -> None:
    assert find_faults(text, "eos") == {"abrupt"}
    assert find_faults(text, "stop") == set(), "a stop sequence cuts on purpose"


def test_an_answer_may_begin_within_a_block_or_a_thought_of_its_prompt() -> None:
    """As HumanEval's: the harness begins the code block, and the model closes it."""
    prompt = "Write it:\n```python\ndef f():\n```\nHere it is:\n```python\ndef f():\n"
    assert find_faults("    return 1\n```\n", "eos", prompt) == set()
    assert find_faults("    return 1\n", "eos", prompt) == set()
    assert find_faults("    return 1\n```\nor\n```python\ndef f", "eos", prompt) == {"abrupt"}
    assert find_faults("It is six.</think>6", "eos", "user: 2 x 3\n<think>\n") == set()
    assert find_faults("It is six", "eos", "user: 2 x 3\n<think>\n") == {"abrupt"}


def answer(item: int, responses: list[object], finishes: list[str | None]) -> Answer:
    return Answer(
        task="t", group=None, prompt="p", answer="", expected="", value=None, correct=None, item=item,
        responses=responses, finishes=finishes,
    )  # fmt: skip


def test_every_sample_of_every_item_is_counted_and_likelihoods_are_not() -> None:
    answers = {
        "code": [answer(0, ["yes", ""], ["eos", "eos"]), answer(1, ["so it goes", "done."], ["length", None])],
        "choices": [answer(0, [-1.5, -2.5], [])],
        "older": [answer(0, ["yes"], [])],
    }
    found = count_faults(answers)
    assert list(found) == ["code", "older"]
    assert found["code"] == {
        "num_answers": 4,
        "num_faulty": 2,
        "num_unknown_finish": 1,
        "empty": 1,
        "looping": 0,
        "endless": 1,
        "abrupt": 1,
        "examples": {
            "empty": {"item": 0, "end": ""},
            "endless": {"item": 1, "end": "so it goes"},
            "abrupt": {"item": 1, "end": "so it goes"},
        },
    }
    assert (found["older"]["num_faulty"], found["older"]["num_unknown_finish"]) == (0, 1)
