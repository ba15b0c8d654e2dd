from __future__ import annotations

from typing import Any

from tunebook.record.page.programs import program_lines


def evaluation(statuses: dict[str, int], backend: str = "service") -> dict[str, Any]:
    task = {"statuses": statuses, "time_limit_s": 3.0}
    execution = {"backend": backend, "limits": {"memory_bytes": 512 << 20}}
    return {"code": {"tasks": {"humaneval": task}, "execution": execution}}


def test_how_programs_ended_and_where() -> None:
    assert program_lines(evaluation({"failed": 1200}), evaluation({"passed": 3, "timed_out": 1})) == [
        "humaneval, before training: 1,200 failed; at most 3 s each",
        "humaneval, after training: 3 passed, 1 timed out; at most 3 s each",
        "Executed in the sandbox service, each with at most 512 MiB of memory",
    ]


def test_each_way_of_executing_is_named() -> None:
    lines = program_lines(evaluation({"failed": 1}, "bubblewrap"), evaluation({"failed": 1}, "unsafe"))
    assert lines[2:] == [
        "Executed in bubblewrap, each with at most 512 MiB of memory",
        "Executed without a sandbox, as confirmed by confirm_run_unsafe_code",
    ]


def test_nothing_is_said_where_there_are_no_programs() -> None:
    assert program_lines(None, None) == []
    assert program_lines({"code": None}, {}) == []
