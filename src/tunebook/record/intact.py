"""Whether a run's files are of the shape in which Tunebook writes them: JSON may be whole and still be no record.

What is worked with most is looked at where a file is read, so that the message names the file and the key. The rest is
found where it is worked with, and the message can only name the folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunebook.errors import DataError

_SECTIONS = ("hardware", "batch", "memory_gib", "time")  # of a plan
_LISTS = ("choices", "problems")  # of a plan, of sections
_COUNTED = ("total_steps", "world_size", "accumulation", "micro", "row_length", "documents_per_step", "tokens_per_step")
_UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def is_number(value: Any) -> bool:
    """Whether a value is null or a finite number, which JSON can also write as one that is too large."""
    try:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))
    except OverflowError:  # a whole number beyond what a float holds
        return False


def check_plan(plan: Any, file: Path) -> None:
    """Raises: DataError for a `plan.json` that is none."""
    if not isinstance(plan, dict):
        raise _broken(file, "it is no object")
    for key in _SECTIONS:
        if not isinstance(plan.get(key) or {}, dict):
            raise _broken(file, f"{key} is {plan[key]!r} and no section")
    for key in _LISTS:
        if not _is_list_of_sections(plan.get(key) or []):
            raise _broken(file, f"{key} is no list of sections")
    for section, keys in (("batch", _COUNTED), ("memory_gib", tuple(plan.get("memory_gib") or ()))):
        for key in keys:
            if not is_number(value := (plan.get(section) or {}).get(key)):
                raise _broken(file, f"{section}.{key} is {value!r} and no number")


def check_evaluation(evaluation: Any, file: Path) -> None:
    """Raises: DataError for an evaluation's record that is none."""
    if not isinstance(evaluation, dict):
        raise _broken(file, "it is no object")
    tasks = evaluation.get("tasks")
    if not isinstance(tasks, dict):
        raise _broken(file, f"tasks is {tasks!r} and no section")
    if not _is_list_of_sections(evaluation.get("samples") or []):
        raise _broken(file, "samples is no list of sections")
    for name, task in tasks.items():
        if not isinstance(task, dict):
            raise _broken(file, f"tasks.{name} is {task!r} and no section")
        for key in ("value", "stderr", "num_items"):
            if not _is_score(task.get(key)):
                raise _broken(file, f"tasks.{name}.{key} is {task[key]!r} and no number")


@contextmanager
def naming(*folders: Path) -> Iterator[None]:
    """Around the work with what was read of these folders. Raises: DataError naming them for what is no record.

    A fault of Tunebook would look the same, so the error keeps what led to it.
    """
    try:
        yield
    except _UNREADABLE as error:
        named = " or ".join(str(folder) for folder in folders)
        raise DataError(
            f"{named}: its run.yaml, plan.json, manifest.json, metrics.jsonl or evaluation/ holds what Tunebook does "
            f"not write there ({type(error).__name__}: {error}), so something else changed it: take the files back "
            "from a copy, or name another run. If nobody did, it is a fault of Tunebook",
            problem_id="broken-record",
        ) from error


def _is_score(value: Any) -> bool:
    """A score may be infinite or no number at all, as a perplexity is; whoever records it refuses that."""
    return value is None or isinstance(value, int | float)


def _is_list_of_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _broken(file: Path, why: str) -> DataError:
    return DataError(
        f"{file}: {why}, which Tunebook does not write, so something else changed the file: take it back from a copy, "
        "or remove it to go on without it",
        problem_id="broken-record",
    )
