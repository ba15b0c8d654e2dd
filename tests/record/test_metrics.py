from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import DataError
from tunebook.record.metrics import by_schedule, read_metrics, remove_later_lines, write_line


def write(folder: Path, *lines: dict[str, Any]) -> None:
    for line in lines:
        write_line(folder, line)


def test_every_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    write_line(tmp_path, {"step": 1, "loss": 2.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]
    write_line(tmp_path, {"step": 1, "validation_loss": 2.0})
    assert len(read_metrics(tmp_path)) == 2


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "memory_gib": [1.0, float("nan")]})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {  # strict JSON: no NaN, no Infinity
        "step": 3, "loss": None, "grad_norm": None, "memory_gib": [1.0, None],
        "not_finite": ["loss", "grad_norm", "memory_gib[1]"],
    }  # fmt: skip


def test_a_truncated_last_line_is_dropped_and_a_broken_one_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    remove_later_lines(tmp_path, 1, {})
    write_line(tmp_path, {"step": 2, "loss": 1.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2") as raised:
        read_metrics(tmp_path)
    assert raised.value.problem_id == "broken-record"


def test_a_resumed_run_leaves_the_lines_up_to_its_checkpoint(tmp_path: Path) -> None:
    validated = [{"step": step, "validation_loss": 10.0 + step} for step in (2, 4)]
    trained = [{"step": step, "loss": 10.0 + step} for step in (1, 2, 3, 4)]
    write(tmp_path, *trained[:2], validated[0], *trained[2:], validated[1])
    remove_later_lines(tmp_path, 4, {2: 12.0, 4: 14.0})
    assert read_metrics(tmp_path) == [*trained[:2], validated[0], *trained[2:], validated[1]]
    remove_later_lines(tmp_path, 4, {2: 12.0})  # validated after the last checkpoint, at the end of the training
    assert read_metrics(tmp_path) == [*trained[:2], validated[0], *trained[2:]]
    remove_later_lines(tmp_path, 2, {2: 12.0})
    write(tmp_path, {"step": 3, "loss": 23.0})
    assert read_metrics(tmp_path) == [*trained[:2], validated[0], {"step": 3, "loss": 23.0}]
    remove_later_lines(tmp_path, 0, {})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_steps_around_a_stop_count_once() -> None:
    lines = [
        {"step": 5, "num_steps": 5, "loss": 4.0},
        {"step": 9, "num_steps": 4, "loss": 3.0},  # stopped and saved here
        {"step": 10, "num_steps": 1, "loss": 1.0},
        {"step": 12, "num_steps": 2, "loss": 0.5},  # stopped again, and not resumed
    ]
    assert by_schedule(lines, 5) == [(5, 4.0), (10, pytest.approx((4 * 3.0 + 1.0) / 5))]
    assert by_schedule([lines[0], lines[1] | {"loss": None}, lines[2]], 5) == [(5, 4.0), (10, None)]
    # Killed after step 10, whose line had five steps, and resumed from step 8: a partly logged window is left out.
    lines = [{"step": step, "num_steps": num, "loss": 20.0 - step} for step, num in ((5, 5), (10, 2), (15, 5))]
    assert by_schedule(lines, 5) == [(5, 15.0), (15, 5.0)]
