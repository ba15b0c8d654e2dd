"""Asking a program: its answer, its failures, and the end of one that never answers."""

from __future__ import annotations

import os
import sys
import time

from tunebook.hardware.asking import ask

PYTHON = (sys.executable, "-c")


def test_an_answer() -> None:
    answer = ask([*PYTHON, "import sys; print('42'); print('by the way', file=sys.stderr)"], timeout_s=30)
    assert (answer.text, answer.errors, answer.problem, answer.is_late) == ("42\n", "by the way\n", None, False)


def test_its_environment_is_the_one_that_is_given() -> None:
    code = "import os; print(os.environ.get('TOPIC'), os.environ.get('HOME'))"
    assert ask([*PYTHON, code], timeout_s=30, environment={"TOPIC": "links"}).text == "links None\n"


def test_a_program_that_is_not_there() -> None:
    answer = ask(["there-is-no-such-program"], timeout_s=5)
    assert answer.problem == "it cannot be started: No such file or directory"


def test_a_failure_has_its_last_words() -> None:
    code = "import sys; print('a table'); print('first\\nlast', file=sys.stderr); sys.exit(9)"
    answer = ask([*PYTHON, code], timeout_s=30)
    assert (answer.problem, answer.last_words, answer.text) == ("it ended with exit code 9", "last", "a table\n")


def test_one_that_crashes() -> None:
    answer = ask([*PYTHON, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], timeout_s=30)
    assert answer.problem == "it was killed by signal 11"
    assert answer.last_words == ""


def test_one_that_hangs_is_ended_with_what_it_started_and_what_it_said_is_kept(tmp_path) -> None:
    child = tmp_path / "child"
    script = f"echo before; sleep 300 & echo $! > {child}; trap '' TERM; wait"
    start = time.monotonic()
    answer = ask(["sh", "-c", script], timeout_s=1)
    assert time.monotonic() - start < 60  # far below its 300 s
    assert (answer.problem, answer.is_late, answer.text) == ("no answer within 1 s", True, "before\n")
    pid = int(child.read_text())
    for _ in range(100):
        if not is_alive(pid):
            break
        time.sleep(0.1)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123  one read
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_no_text_is_no_error() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfe NV')"
    assert ask([*PYTHON, code], timeout_s=30).text.endswith(" NV")
