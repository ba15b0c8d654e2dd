from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.errors import DataError
from tunebook.record.metrics import MetricsWriter, by_schedule, read_metrics


def test_every_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": 2.5})
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]
        writer.write({"step": 1, "validation_loss": 2.0})
    assert len(read_metrics(tmp_path)) == 2


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "memory_gib": [1.0, float("nan")]})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {  # strict JSON: no NaN, no Infinity
        "step": 3, "loss": None, "grad_norm": None, "memory_gib": [1.0, None],
        "not_finite": ["loss", "grad_norm", "memory_gib[1]"],
    }  # fmt: skip


def test_truncated_last_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 2, "loss": 1.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not JSON"):
        read_metrics(tmp_path)


def test_steps_that_a_resumed_run_trained_again_are_counted_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.write({"step": step, "loss": 10.0 + step})
            if step in (2, 4):
                writer.write({"step": step, "validation_loss": 10.0 + step})
    with MetricsWriter(tmp_path) as writer:  # resumed from the checkpoint of step 2
        writer.write({"step": 3, "loss": 23.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 11.0},
        {"step": 2, "loss": 12.0},
        {"step": 2, "validation_loss": 12.0},
        {"step": 3, "loss": 23.0},
    ]


def test_no_file_means_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_steps_around_a_stop_count_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 5, "num_steps": 5, "loss": 4.0})
        writer.write({"step": 9, "num_steps": 4, "loss": 3.0})  # stopped and saved here
        writer.write({"step": 10, "num_steps": 1, "loss": 1.0})
        writer.write({"step": 12, "num_steps": 2, "loss": 0.5})  # stopped again, and not gone on from
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [5, 9, 10, 12]
    assert by_schedule(lines, 5) == [(5, 4.0), (10, pytest.approx((4 * 3.0 + 1.0) / 5))]
    assert by_schedule([lines[0], lines[1] | {"loss": None}, lines[2]], 5) == [(5, 4.0), (10, None)]


def test_stop_without_a_resume_from_it_is_ignored(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 5, "num_steps": 5, "loss": 4.0})
        writer.write({"step": 6, "validation_loss": 3.5})
        writer.write({"step": 9, "num_steps": 4, "loss": 3.0})
        writer.write({"step": 10, "num_steps": 5, "loss": 2.0})  # from the checkpoint of step 5
    lines = read_metrics(tmp_path)
    assert [(line["step"], line.get("loss")) for line in lines] == [(5, 4.0), (6, None), (10, 2.0)]
    assert by_schedule([lines[0], lines[2]], 5) == [(5, 4.0), (10, 2.0)]


def test_partly_logged_window_is_left_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step, num_steps in ((5, 5), (10, 5), (10, 2), (15, 5)):  # killed after 10, gone on from step 8
            writer.write({"step": step, "num_steps": num_steps, "loss": 20.0 - step})
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["num_steps"]) for line in lines] == [(5, 5), (10, 2), (15, 5)]
    assert by_schedule(lines, 5) == [(5, 15.0), (15, 5.0)]
    older = [{key: value for key, value in line.items() if key != "num_steps"} for line in lines]
    assert by_schedule(older, 5) == [(5, 15.0), (10, 10.0), (15, 5.0)]


def test_a_stop_before_a_killed_attempt_counts_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step, num_steps in ((5, 5), (9, 4), (10, 1), (10, 5)):  # killed after 10, gone on from step 5
            writer.write({"step": step, "num_steps": num_steps, "loss": float(num_steps)})
    assert by_schedule(read_metrics(tmp_path), 5) == [(5, 5.0), (10, 5.0)]


def test_validations_of_a_discarded_stretch_are_left_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 5, "num_steps": 5, "loss": 4.0})
        for step in (5, 6, 8):
            writer.write({"step": step, "validation_loss": 10.0 + step})
        writer.write({"step": 6, "validation_loss": 26.0})  # killed at 9, gone on from step 5
        assert [line["step"] for line in read_metrics(tmp_path)] == [5, 5, 6]
        writer.write({"step": 8, "validation_loss": 28.0})
        writer.write({"step": 7, "num_steps": 2, "loss": 3.0})  # killed again, and stopped at 7
    found = [(line["step"], line.get("loss", line.get("validation_loss"))) for line in read_metrics(tmp_path)]
    assert found == [(5, 4.0), (5, 15.0), (6, 26.0), (7, 3.0)]


@pytest.mark.parametrize("num_steps", ['"two"', "0", "null"])
def test_a_line_is_the_mean_of_one_step_or_more(tmp_path: Path, num_steps: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "num_steps": {num_steps}, "loss": 2.0}}\n')
    with pytest.raises(DataError, match=r"line 1: num_steps is .*, not a number of steps"):
        read_metrics(tmp_path)
