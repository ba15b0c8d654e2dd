from __future__ import annotations

from typing import Any

from tunebook.evaluate.results import Answer
from tunebook.record.answer_faults import FAULTS, count_faults, fault_warnings, find_faults


def record(num_answers: int = 200, task: str = "gsm8k", **counts: int) -> dict[str, Any]:
    found = {fault: counts.get(fault, 0) for fault in FAULTS}
    examples = {fault: {"item": 0, "end": f"{fault} answer"} for fault, count in found.items() if count}
    return {"answer_faults": {task: {"num_answers": num_answers, **found, "examples": examples}}}


PROSE = (
    "The river rises in the hills north of the town and runs for forty miles to the sea. Along its banks there are "
    "mills, most of them built before the railway came. Two of them still work, and one sells its flour on Saturdays. "
)
TABLE = "| year | mills | flour |\n|---|---|---|\n" + "".join(f"| {1900 + n} | {n * 7 % 13} | 0 |\n" for n in range(60))
RIGHT = {
    "yes": "yes",
    "prose": PROSE,
    "table": TABLE,
    "zeros": "[" + ", ".join(["0"] * 64) + "]",
    "separator": PROSE + "-" * 100,
    "rhyme": "Row, row, row your boat gently down the stream. Merrily, merrily, merrily, merrily, life is but a dream.",
    "thought": "<think>Seven times six is forty-two, of course.</think>42",
    "loop in the middle": "ho " * 18 + PROSE,
}


LOOPS = {
    "sentence": PROSE + "I hope this helps you. " * 20,
    "line": PROSE + "\n" + "print(x)\n" * 30,
    "word": "The answer is " + "yes " * 20,
    "chinese": "\u6211\u4e0d\u77e5\u9053\u3002" * 20,
    "cut within a repeat": "Let us see. " * 20 + "Let us",
}


def test_faults_of_one_answer() -> None:
    for name, text in RIGHT.items():
        assert find_faults(text, is_cut=False) == set(), name
        assert find_faults(text, is_cut=True) == {"endless"}, name
    for text in ("", " \n\t", "<think>Nothing to say.</think>\n", "</think>"):
        assert find_faults(text, is_cut=False) == {"empty"}
    for name, text in LOOPS.items():
        assert find_faults(text, is_cut=False) == {"looping"}, name


def answer(item: int, responses: list[object], max_new_tokens: int | None) -> Answer:
    return Answer(
        task="t", group=None, prompt="p", answer="", expected="", value=None, correct=None, item=item,
        responses=responses, max_new_tokens=max_new_tokens,
    )  # fmt: skip


def test_every_sample_of_every_item_is_counted_and_likelihoods_are_not() -> None:
    answers = {
        "code": [answer(0, ["yes", ""], 10), answer(1, ["so it goes on", "done."], 4)],
        "choices": [answer(0, [-1.5, -2.5], None)],
    }
    examples = {"empty": {"item": 0, "end": ""}, "endless": {"item": 1, "end": "so it goes on"}}
    assert count_faults(answers, lambda text: len(text.split())) == {
        "code": {
            "num_answers": 4, "empty": 1, "looping": 0, "endless": 1, "examples": examples,
        }
    }  # fmt: skip


def test_more_faults_than_before_are_a_warning() -> None:
    (line,) = fault_warnings(record(endless=10, empty=1), record(endless=60, empty=1))
    assert "30.0% (60 of 200)" in line
    assert "5.0% (10 of 200) before" in line
    assert len(fault_warnings(record(), record(empty=30))) == 1
    assert fault_warnings(record(endless=60), record(endless=10)) == []
    assert fault_warnings(record(endless=10), record(endless=18)) == []  # less than the margin
    for before in (None, record(task="other")):
        assert fault_warnings(before, record(endless=200)) == []
