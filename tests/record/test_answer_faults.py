from __future__ import annotations

from typing import Any

import pytest

from tunebook.record.answer_faults import fault_rows, fault_warnings


def record(num_answers: int = 200, task: str = "gsm8k", **counts: int) -> dict[str, Any]:
    found = {fault: counts.get(fault, 0) for fault in ("empty", "looping", "endless", "abrupt")}
    examples = {fault: {"item": 0, "end": f"{fault} answer"} for fault, count in found.items() if count}
    return {"answer_faults": {task: {"num_answers": num_answers, **found, "examples": examples}}}


def test_more_faults_than_before_are_a_warning() -> None:
    assert fault_warnings(record(endless=10, empty=1), record(endless=60, empty=1)) == [
        "gsm8k: 30.0% (60 of 200) of the answers after training reached the limit of new tokens, 5.0% "
        "(10 of 200) before"
    ]
    assert "are empty, 0.0%" in fault_warnings(record(), record(empty=30))[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (record(endless=60), record(endless=10)),
        (record(endless=10), record(endless=18)),  # less than the margin
        (record(10), record(10, looping=2)),  # one in five of ten may be chance
        (None, record(endless=200)),
        (record(task="other"), record(endless=200)),
        ({"tasks": {}}, record(endless=200)),  # of an older version
        (record(0), record(0)),
        (
            {"answer_faults": {"gsm8k": {**record()["answer_faults"]["gsm8k"], "num_unknown_finish": 200}}},
            record(endless=200),
        ),
    ],
)
def test_no_warning(before: Any, after: Any) -> None:
    assert fault_warnings(before, after) == []


def test_the_report_lists_the_faults_that_there_were() -> None:
    rows = fault_rows(record(endless=190, looping=4), record(endless=2))
    assert [(row.fault, row.before, row.after, row.is_warning) for row in rows] == [
        ("repeat themselves to the end", "2.0% (4 of 200)", "0.0% (0 of 200)", False),
        ("reached the limit of new tokens", "95.0% (190 of 200)", "1.0% (2 of 200)", False),
    ]
    assert [(row.example, row.example_when) for row in rows] == [
        ("looping answer", "before"),
        ("endless answer", "after"),
    ]
    assert fault_rows(None, {"tasks": {}}) == []
