"""`metrics.jsonl`: one JSON object per logged step, appended and flushed at once.

A training line has `step, num_steps, loss, ...`; the loss is the mean of the last `num_steps` steps. A validation line
has `step, validation_loss, validation_tokens`. The last step is always logged, and so is each step with a validation if
training may stop early. A run that is stopped between two logged steps logs the steps since the first of them, and logs
the remaining ones after it resumes; `by_schedule` combines both lines. The first training line after a save has
`save_seconds`, the time that training waited for the save. A killed run loses at most the line it was writing. A
resumed run removes the lines after its checkpoint, then appends, so that each step is in one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tunebook.errors import DataError
from tunebook.files import atomic_write_text

METRICS_FILE = "metrics.jsonl"
NOT_FINITE = "not_finite"  # names of the numbers of a line that were NaN or infinite, and are null in it
_WARM_UP_SHARE = 0.1  # of the logged steps, excluded from the median speed if there are enough of them


def write_line(folder: Path, line: Mapping[str, Any]) -> None:
    """Append one line, on rank 0. Numbers that are not finite become null and are listed in `not_finite`."""
    not_finite: list[str] = []
    written = {name: _finite(value, name, not_finite) for name, value in line.items()}
    if not_finite:
        written[NOT_FINITE] = not_finite
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(written, allow_nan=False) + "\n")


def remove_later_lines(folder: Path, step: int, validated: Container[int]) -> None:
    """Leave only what the checkpoint of `step` contains: an attempt that starts from it writes the rest again.

    `validated` are the steps whose validation loss it contains. A validation after the last step is not in it.
    """
    kept = [
        line
        for line in read_metrics(folder)
        if (line["step"] <= step if is_training_line(line) else line["step"] in validated)
    ]
    atomic_write_text(folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line; empty if nothing was logged yet. Raises: DataError for a broken line that is not the last."""
    path = folder / METRICS_FILE
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            parsed += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            if number == len(lines):  # no newline follows: the run was killed while writing it
                break
            raise DataError(
                f"{path} line {number} is not JSON ({error}). Tunebook writes whole lines, so something else changed "
                "the file; remove that line",
                problem_id="broken-record",
            ) from error
    return parsed


def by_schedule(lines: Iterable[Mapping[str, Any]], every: int) -> list[tuple[int, float | None]]:
    """(step, loss) of the training lines as an uninterrupted run would have logged them.

    Lines between two steps of the schedule are averaged into the second one, weighted by their number of steps. The
    result is None if one of them was not finite. A step of the schedule is omitted if some of its steps are in no line:
    a killed run may resume between two logged steps, and the line that it had logged across its checkpoint is dropped.
    Lines after the last step of the schedule are ignored.
    """
    scheduled: list[tuple[int, float | None]] = []
    window: list[Mapping[str, Any]] = []
    for line in lines:
        window.append(line)
        if line["step"] % every == 0:
            num_steps = sum(part["num_steps"] for part in window)
            mean = line["loss"]  # of a single line exactly
            if len(window) > 1:
                is_finite = all(part["loss"] is not None for part in window)
                mean = sum(part["loss"] * part["num_steps"] for part in window) / num_steps if is_finite else None
            if num_steps >= every:
                scheduled.append((line["step"], mean))
            window = []
    return scheduled


def is_training_line(line: Mapping[str, Any]) -> bool:
    """True for a line of a training step, False for one of a validation."""
    return "validation_loss" not in line


def median_after_warm_up(values: list[float]) -> float | None:
    """The median of values logged per step, such as a speed, without the slow first steps."""
    if not values:
        return None
    num_warm_up = round(_WARM_UP_SHARE * len(values)) if len(values) >= 10 else int(len(values) > 1)
    return median(values[num_warm_up:])


def _finite(value: Any, name: str, not_finite: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        not_finite.append(name)
        return None
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}[{index}]", not_finite) for index, item in enumerate(value)]
    return value
