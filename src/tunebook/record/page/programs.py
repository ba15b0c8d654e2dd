"""What a report says of programs that a model wrote: how they ended, and what kept them from everything else."""

from __future__ import annotations

from typing import Any


def program_lines(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """A line per task and evaluation, and one on how they were executed; none where no task asked for programs."""
    codes = {"before": (before or {}).get("code"), "after": (after or {}).get("code")}
    lines = [
        f"{name}, {when} training: {_ends(task['statuses'])}; at most {task['time_limit_s']:g} s each"
        for when, code in codes.items()
        if code
        for name, task in code["tasks"].items()
    ]
    executions = {_execution(code["execution"]): None for code in codes.values() if code}
    return [*lines, *executions]


def _ends(statuses: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {status.replace('_', ' ')}" for status, number in statuses.items())


def _execution(execution: dict[str, Any]) -> str:
    if execution["backend"] == "unsafe":
        return "Executed without a sandbox, as confirmed by confirm_run_unsafe_code"
    where = "the sandbox service" if execution["backend"] == "service" else execution["backend"]
    return f"Executed in {where}, each with at most {execution['limits']['memory_bytes'] >> 20} MiB of memory"
