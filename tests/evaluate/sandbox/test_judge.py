"""Verdicts on right and wrong programs: the same as code_eval's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tunebook.evaluate.sandbox.start import Program, Status, run_programs

PAIRS = {
    "carriage returns": ("def area(a, b):\r\n  return a*b", "assert area(10,20)==200\nassert area(4,8)==32"),
    **{
        section.partition("\n")[0]: tuple(section.partition("\n")[2].split("--- test\n"))
        for section in (Path(__file__).parent / "pairs.txt").read_text(encoding="utf-8").split("\n=== ")[1:]
    },
    "not even text of Python": ("def f():\n    return '\0'", "assert f() == '\0'"),
    "half a surrogate pair": ("x = '\ud800'\ndef f():\n    return 1", "assert f() == 1"),
}


FAILURES = [
    ("def f():\n    return 1", "\nassert f() == 2", Status.failed, r"^AssertionError \(test, line 2\)$"),
    ("\n1 / 0", "assert 1", Status.failed, r"^ZeroDivisionError: division by zero \(program, line 2\)$"),
    ("def f():\n    return {}['x']", "f()", Status.failed, r"^KeyError: 'x' \(program, line 2\) \(test, line 1\)$"),
    ("def f(:", "f()", Status.failed, r"^SyntaxError: .*\(program, line 1\)$"),
    ("import os\nos._exit(0)", "assert 1", Status.failed, r"^it ended before its test did \(exit code 0\)$"),
    ("import sys\nsys.exit(0)", "assert 1", Status.failed, r"^SystemExit: 0 \(program, line 2\)$"),
    ("import os\ndef f():\n    os.kill(os.getpid(), 11)\n    os.abort()", "f()", Status.crashed, "by signal"),
    ("while True:\n    pass", "assert 1", Status.timed_out, r"^it was not done after 1 s$"),
    ("def f():\n    return 'x' * 10**10", "f()", Status.memory, "^MemoryError"),
    ("def f():\n    while True:\n        print('spam')", "f()", Status.output, r"^it printed more than 1024 KiB$"),
    ("def f():\n    open('x', 'wb').write(bytes(70 << 20))", "f()", Status.disk, "File too large|No space left"),
    ("def f():\n    return 1", "assert f(", Status.failed, r"^SyntaxError: .*\(test, line 1\)$"),
]  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(bubblewrap):
    """The verdict on each program and test; all are judged in one sandbox."""
    limits = dict.fromkeys(PAIRS.values(), 10.0)
    limits |= {(source, test): 1.0 if status is Status.timed_out else 20.0 for source, test, status, _ in FAILURES}
    requests = [{"source": source, "test": test, "time_limit_s": limits[source, test]} for source, test in limits]
    answer = bubblewrap.ask("".join(json.dumps(request) + "\n" for request in requests).encode(), 200.0)
    return dict(zip(limits, map(json.loads, answer.splitlines()), strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_the_verdict_is_that_of_code_eval(name, verdicts):
    """code_eval runs both in one process, and accepts if nothing is raised."""
    is_right = list(PAIRS).index(name) < list(PAIRS).index("wrong")
    assert (verdicts[PAIRS[name]]["status"] == Status.passed) == is_right, verdicts[PAIRS[name]]


@pytest.mark.parametrize(("source", "test", "status", "message"), FAILURES)
def test_a_failure_is_explained(source, test, status, message, verdicts):
    verdict = verdicts[source, test]
    assert verdict["status"] == status, verdict
    assert re.search(message, verdict["message"]), verdict


def test_the_last_lines_are_kept_and_cannot_control_the_terminal(bubblewrap):
    source = "for n in range(100):\n    print('line', n)\nprint('é\\x1b]0;owned\\x07')\nraise ValueError('\\x1b[2J')"
    [outcome] = run_programs([Program(id="sample", source=source, test="assert 0", time_limit_s=10.0)], bubblewrap)
    assert outcome.last_lines == [*(f"line {n}" for n in range(91, 100)), "é\\x1b]0;owned\\x07"]
    assert outcome.message == "ValueError: \\x1b[2J (program, line 4)"
