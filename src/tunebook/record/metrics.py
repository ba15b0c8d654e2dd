"""`metrics.jsonl`: one JSON object per logged step, appended and flushed at once, and what MFU is computed from.

A training line has `step, loss, ...`, a validation line `step, validation_loss, validation_tokens`. A run that is
killed loses at most the line it was writing; a run that goes on from a checkpoint appends to the same file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tunebook.config.schema import ModelFacts
from tunebook.errors import DataError

METRICS_FILE = "metrics.jsonl"
NOT_FINITE = "not_finite"  # the names of the numbers of a line that were NaN or infinite, and are null in it


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

    A line that goes back to an earlier step is a run that resumed there: what was logged from that step on before is
    left out, since the resumed run trained it again. Raises: DataError for a broken line that is not the last.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    last_step = -1
    for line in _parse_lines(path):
        if is_training_line(line):
            if line["step"] <= last_step:
                lines = [kept for kept in lines if kept["step"] < line["step"]]
            last_step = line["step"]
        lines.append(line)
    return lines


def is_training_line(line: Mapping[str, Any]) -> bool:
    """Whether a line is of a training step rather than of a validation."""
    return "validation_loss" not in line


def attended_length_tokens(document_lengths: Iterable[int]) -> float:
    """The mean document length as a token sees it: sum of squares / sum. Long documents hold more of the tokens."""
    num_tokens = num_squared = 0
    for length in document_lengths:
        num_tokens += length
        num_squared += length * length
    return num_squared / num_tokens if num_tokens else 0.0


def flops_per_token(facts: ModelFacts, attended_length: float, num_trained_parameters: int | None = None) -> float:
    """Floating-point operations that training on one token needs: 6 x parameters + attention.

    Products with the weights: 2 operations per parameter forward, 2 backward for the gradient of the input, and 2 for
    the gradient of the weight where it is trained: 4 x all + 2 x trained. That is 6 x parameters in a full fine-tune;
    with adapters (`num_trained_parameters`; None means all) the frozen weights count 4.

    Attention: the i-th token of a document compares itself with i keys (2 x i x hidden_size) and averages i values
    (2 x i x hidden_size). Over a document of T tokens i sums to T^2 / 2: 2 x T^2 x hidden_size per layer forward, three
    times that with the backward pass, so 6 x num_layers x hidden_size x T^2 per document, or per token
    12 x num_layers x hidden_size x T / 2 with T = `attended_length` = sum of T^2 / sum of T (`attended_length_tokens`).

    Not counted: norms, softmax, and activations computed twice under checkpointing, so that MFU measures useful work.
    """
    trained = facts.num_parameters if num_trained_parameters is None else num_trained_parameters
    weights = 4 * facts.num_parameters + 2 * trained
    return weights + 12 * facts.num_layers * facts.hidden_size * attended_length / 2


def model_flops_utilisation(tokens_per_second_per_gpu: float, flops: float, peak_tflops: float) -> float:
    """MFU: the share of one GPU's peak arithmetic spent on real (non-padding) tokens, 0 to 1."""
    return tokens_per_second_per_gpu * flops / (peak_tflops * 1e12)


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
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the run was killed while writing it
                return
            raise DataError(
                f"{path} line {number} is not JSON ({error}); lines are written whole, so something else changed the "
                "file: remove that line",
                problem_id="broken-record",
            ) from error


def _remove_unfinished_line(path: Path) -> None:
    """Cut what an earlier, killed attempt left behind the last newline, or the next line would be glued to it."""
    if not path.is_file():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
