from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.record.page.charts import Chart
from tunebook.record.page.curves import (
    dash_of_run,
    late_loss_chart,
    loss_chart,
    other_charts,
    outlier_ceiling,
    overlaid_charts,
    smooth,
)
from tunebook.record.run_record import RunRecord, read_run


def record_of(*losses: float | None) -> RunRecord:
    lines = [{"step": step, "loss": loss, "tokens_seen": 100 * step} for step, loss in enumerate(losses, 1)]
    return RunRecord(folder=Path("outputs/example/time"), training=lines)


def test_smoothing_leaves_a_straight_line_where_it_is() -> None:
    points = [(float(x), 10.0 - x) for x in range(10)]
    smoothed, span = smooth(points)
    assert span == 5
    assert [y for _, y in smoothed] == pytest.approx([y for _, y in points])


def test_smoothing_by_hand_and_over_a_gap() -> None:
    smoothed, _ = smooth([(1, 1.0), (2, 5.0), (3, None), (4, 3.0), (5, 1.0)])
    assert smoothed == [(1, 1.0), (2, 3.0), (3, None), (4, 2.0), (5, 1.0)]


def test_only_long_curves_are_smoothed() -> None:
    few, many = loss_chart(record_of(3, 2, 1)), loss_chart(record_of(*[2.0] * 60))
    assert few is not None and [line.name for line in few.lines] == ["training"]
    assert many is not None and [line.name for line in many.lines] == [
        "training, each logged step",
        "training, mean of 5 logged steps",
    ]
    assert loss_chart(record_of()) is None


@pytest.mark.parametrize(("every", "told"), [(1, "each step"), (5, "mean of each 5 steps")])
def test_loss_label_contains_the_logging_interval(every: int, told: str) -> None:
    record = replace(record_of(*[8.0] * 40, *[0.5] * 40), config={"training": {"log_every_steps": every}})
    loss, late = loss_chart(record), late_loss_chart(record)
    assert loss is not None and loss.lines[0].name == f"training, {told}"
    assert late is not None and late.lines[0].name == told


def test_speed_is_per_gpu_or_per_cpu_rank(make_run) -> None:
    on_cpu, on_gpus = read_run(make_run("2026-11-21T07-18-05Z")), read_run(make_run("2026-11-21T07-18-06Z", ranks=8))

    def label(charts: list[Chart]) -> str:
        return next(chart.y_label for chart in charts if chart.title == "Throughput")

    assert label(other_charts(on_cpu)[0]) == "real tokens per second and rank"
    assert label(other_charts(on_gpus)[0]) == "real tokens per second and GPU"
    assert label(overlaid_charts([on_cpu, on_gpus], ["a", "b"])) == "real tokens per second and GPU or rank"


def test_the_step_at_which_the_loss_was_not_finite_is_marked() -> None:
    record = RunRecord(folder=Path("a/b"), training=[
        {"step": 1, "loss": 2.0}, {"step": 2, "loss": None, "not_finite": ["loss"]},
    ])  # fmt: skip
    chart = loss_chart(record)
    assert chart is not None
    assert [(mark.x, mark.text) for mark in chart.marks] == [(2, "not finite, step 2")]


def test_flattened_second_half_gets_its_own_axes() -> None:
    assert late_loss_chart(record_of(*[8.0] * 40, *[0.5] * 40)) is not None
    assert late_loss_chart(record_of(*[3.0] * 40, *[2.0] * 40)) is None  # readable as it is
    assert late_loss_chart(record_of(8.0, 0.1)) is None


def test_only_real_outliers_cut_an_axis() -> None:
    assert outlier_ceiling([1.0] * 99 + [100.0]) == 1.5
    assert outlier_ceiling([float(x) for x in range(100)]) is None
    assert outlier_ceiling([1.0, 100.0]) is None  # too few to say what is usual


def test_what_was_not_recorded_is_named(make_run) -> None:
    charts, missing = other_charts(read_run(make_run()))
    assert missing == ["Model FLOPs utilization"]
    assert [chart.title for chart in charts] == [
        "Loss, second half", "Learning rate", "Gradient norm", "Throughput", "Padding", "Memory",
    ]  # fmt: skip
    _, missing = other_charts(record_of(1.0, 2.0))
    assert missing == ["Learning rate", "Gradient norm", "Throughput", "Model FLOPs utilization", "Padding", "Memory"]


def test_memory_of_several_ranks_is_a_band_under_the_highest(make_run) -> None:
    charts, _ = other_charts(read_run(make_run(ranks=4)))
    memory = charts[-1]
    assert memory.lines[0].points[-1] == (240, 1.71)
    assert memory.band[-1] == (240, 1.5, 1.71)


def test_runs_are_overlaid_over_steps_and_over_tokens() -> None:
    charts = overlaid_charts([record_of(3, 2), record_of(4, 3, 2)], ["a", "b"])
    assert [(chart.title, chart.x_label) for chart in charts] == [
        ("Loss over steps", "optimizer step"), ("Loss over tokens", "tokens seen"),
    ]  # fmt: skip
    assert charts[1].lines[1].points == [(100, 4), (200, 3), (300, 2)]


def test_eighteen_runs_look_different() -> None:
    assert len({(index % 6, dash_of_run(index)) for index in range(18)}) == 18
