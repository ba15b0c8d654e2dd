"""`metrics.jsonl`: one JSON object per logged step, appended and flushed at once.

A training line has `step, num_steps, loss, ...`, where the loss is the mean of the last `num_steps` steps, and a
validation line `step, validation_loss, validation_tokens`. The last step is logged whatever the schedule, and so is
each step with a validation where training may stop early. A run that ends between two logged steps logs those since the
first of them, and one that goes on logs fewer up to the second; `by_schedule` puts both together. The first
training line after a save has `save_seconds`, for which training stood still; of the last save its record has it, with
what was waited for at the end. A run that is killed loses at most the line it was writing; a run that goes on from a
checkpoint appends to the same file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from tunebook.errors import DataError
from tunebook.record.intact import is_number

METRICS_FILE = "metrics.jsonl"
_WARM_UP_SHARE = 0.1  # of the logged steps, left out of the median speed where there are enough of them
NOT_FINITE = "not_finite"  # the names of the numbers of a line that were NaN or infinite, and are null in it
# What is worked with later, if a line has it; each may be null, and so may each number of a list.
_NUMBERS = (
    "loss", "validation_loss", "grad_norm", "learning_rate", "tokens_seen", "tokens_per_second_per_gpu", "mfu",
    "peak_tflops", "padding_share", "seconds",
)  # fmt: skip
_LISTS = ("memory_gib", "memory_reserved_gib", "memory_device_gib")


class MetricsWriter:
    """Appends lines to a run's metrics; for one process at a time (rank 0)."""

    def __init__(self, folder: Path) -> None:
        path = folder / METRICS_FILE
        _remove_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null and are named under `not_finite`."""
        not_finite: list[str] = []
        written = {name: _finite(value, name, not_finite) for name, value in line.items()}
        if not_finite:
            written[NOT_FINITE] = not_finite
        self._file.write(json.dumps(written, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes raise ValueError."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line in the order of training; empty when nothing was logged yet.

    A line that goes back to an earlier step, or says the same again of one, is a run that resumed there: what was
    logged from that step on before is left out, since the resumed run trained it again. Raises: DataError for a broken
    line that is not the last.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    last_step = last_validation = -1  # of the lines kept so far
    for line in _parse_lines(path):
        step = line["step"]
        if is_training_line(line):
            if step <= max(last_step, last_validation):  # of one step the training's line is written first
                lines = [kept for kept in lines if kept["step"] < step]
                last_step = max((kept["step"] for kept in lines if is_training_line(kept)), default=-1)
            if (first := _first_step(line)) <= last_step:  # a stop was logged, and its checkpoint not gone on from
                lines = [kept for kept in lines if not is_training_line(kept) or kept["step"] < first]
            last_step, last_validation = step, min(last_validation, step)
        else:
            if step <= last_validation:
                lines = [kept for kept in lines if is_training_line(kept) or kept["step"] < step]
            last_validation = step
        lines.append(line)
    return lines


def by_schedule(lines: Iterable[Mapping[str, Any]], every: int) -> list[tuple[int, float | None]]:
    """(step, loss) of the training lines as a run that was never stopped would have logged them.

    What was logged since the last step of the schedule belongs to the next one, each line's mean counting for as many
    steps as it is of; none where one of them was not finite. Lines after the last step of the schedule are left out. So
    is a step of the schedule if some of those that belong to it are in no line: a killed run may go on from between two
    logged steps, and the line that it had logged over both sides of its checkpoint is discarded.
    """
    found: list[tuple[int, float | None]] = []
    window: list[Mapping[str, Any]] = []
    for line in lines:
        window.append(line)
        if line["step"] % every == 0:
            has_lengths = all("num_steps" in one for one in window)
            if not has_lengths or sum(one["num_steps"] for one in window) >= every:
                found.append((line["step"], _mean_of([(one["loss"], one.get("num_steps", 1)) for one in window])))
            window = []
    return found


def _mean_of(losses: list[tuple[float | None, int]]) -> float | None:
    if len(losses) == 1:
        return losses[0][0]  # in every bit
    known = [(loss, num_steps) for loss, num_steps in losses if loss is not None]
    if len(known) < len(losses):
        return None
    return sum(loss * num_steps for loss, num_steps in known) / sum(num_steps for _, num_steps in known)


def _first_step(line: Mapping[str, Any]) -> int:
    """Of those whose loss a training line is the mean of."""
    first: int = line["step"] - line.get("num_steps", 1) + 1
    return first


def is_training_line(line: Mapping[str, Any]) -> bool:
    """Whether a line is of a training step rather than of a validation."""
    return "validation_loss" not in line


def _finite(value: Any, name: str, not_finite: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        not_finite.append(name)
        return None
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}[{index}]", not_finite) for index, item in enumerate(value)]
    return value


def _parse_lines(path: Path) -> Iterable[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the run was killed while writing it
                return
            raise DataError(
                f"{path} line {number} is not JSON ({error}); lines are written whole, so something else changed the "
                "file: remove that line",
                problem_id="broken-record",
            ) from error
        if wrong := _why_no_line(read):
            raise DataError(
                f"{path} line {number}: {wrong}, which no run writes, so something else changed the file: take it back "
                "from a copy, or train again",
                problem_id="broken-record",
            )
        yield read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _why_no_line(read: Any) -> str | None:
    """What is wrong with a line that is JSON; None for one that a run may have written."""
    if not isinstance(read, dict):
        return f"{read!r} is no object"
    if not isinstance(read.get("step"), int):
        return "it has no step"
    if read["step"] < (1 if is_training_line(read) else 0):
        return f"step is {read['step']}, before the first"
    if not isinstance(read.get("num_steps", 1), int) or read.get("num_steps", 1) < 1:
        return f"num_steps is {read['num_steps']!r} and no number of steps"
    for name in _NUMBERS:
        if not is_number(read.get(name)):
            return f"{name} is {read[name]!r} and no number"
    for name in _LISTS:
        numbers = read.get(name) or []
        if not isinstance(numbers, list) or not all(map(is_number, numbers)):
            return f"{name} is {numbers!r} and no list of numbers"
    if not isinstance(read.get(NOT_FINITE, []), list):
        return f"{NOT_FINITE} is {read[NOT_FINITE]!r} and no list of names"
    return None


def _remove_unfinished_line(path: Path) -> None:
    """Cut what an earlier, killed attempt left behind the last newline, or the next line would be glued to it."""
    if not path.is_file():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def median_after_warm_up(values: list[float]) -> float | None:
    """The usual one of what was logged step by step, such as a speed; the slow first steps are left out."""
    if not values:
        return None
    num_warm_up = round(_WARM_UP_SHARE * len(values)) if len(values) >= 10 else int(len(values) > 1)
    return median(values[num_warm_up:])
