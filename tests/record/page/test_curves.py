from __future__ import annotations

from pathlib import Path

from tunebook.record.page.charts import loss_charts, other_charts
from tunebook.record.run_record import RunRecord, read_run


def record_of(*losses: float | None) -> RunRecord:
    lines = [{"step": step, "loss": loss, "tokens_seen": 100 * step} for step, loss in enumerate(losses, 1)]
    return RunRecord(folder=Path("outputs/example/time"), training=lines)


def test_only_long_curves_are_smoothed_and_a_loss_that_is_not_finite_is_marked() -> None:
    (few,), (many,) = loss_charts(record_of(3, 2, 1)), loss_charts(record_of(*[2.0] * 60))
    assert [line.name for line in few.lines] == ["training"]
    assert [line.name for line in many.lines] == ["training, each logged step", "training, mean of 5 logged steps"]
    assert loss_charts(record_of()) == []
    record = record_of(2.0, None)
    record.training[1]["not_finite"] = ["loss"]
    assert loss_charts(record)[0].mark == (2, "not finite, step 2")


def test_recorded_curves_are_drawn_and_memory_of_several_ranks_is_a_band(make_run) -> None:
    charts = other_charts(read_run(make_run()))
    assert [chart.title for chart in charts] == ["Learning rate", "Gradient norm", "Throughput", "Padding", "Memory"]
    memory = other_charts(read_run(make_run("2026-11-21T07-18-06Z", ranks=4)))[-1]
    assert memory.lines[0].points[-1] == (240, 1.71)
    assert memory.band[-1] == (240, 1.5, 1.71)
