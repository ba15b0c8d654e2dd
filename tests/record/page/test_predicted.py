"""The plan's prediction compared with the measurement: the bar, the differences, and missing estimates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.record.page.overview import summarize
from tunebook.record.page.predicted import Compared, build_prediction, draw_stack, memory_stack
from tunebook.record.report import write_report
from tunebook.record.run_record import RunRecord

MINUS = "\N{MINUS SIGN}"
PARTS = {"weights": 10.0, "gradients": 0.0, "optimizer": 20.0, "overhead": 5.0}
MEMORY = {**PARTS, "total": 35.0, "allocated": 30.0, "capacity": 80.0}
TIME = {
    "tokens_per_second_per_gpu": 1_100.0, "tokens_per_second": 2_200.0, "tokens": 7_920_000.0, "hours": 1.0,
    "gpu_hours": 2.0, "efficiency": 0.4, "peak_tflops": 989.0, "assumption": "assumed: the share of another GPU",
}  # fmt: skip


def run(generation: str = "hopper", *, steps: int = 2, measured: bool = True, **plan: Any) -> RunRecord:
    line = {"tokens_per_second_per_gpu": 1_000.0, "memory_gib": [24.0, 25.0]}
    if measured:
        line |= {"memory_reserved_gib": [28.0, 40.0], "memory_device_gib": [44.0, 43.0]}
    training = [line | {"step": step, "tokens_seen": 400_000 * step, "seconds": 200.0} for step in range(1, steps + 1)]
    content = {"hardware": {"generation": generation}, "batch": {"total_steps": 2}} | plan
    return RunRecord(folder=Path("a/b"), plan=content, training=training)


def rows_of(record: RunRecord) -> dict[str, Compared]:
    found = build_prediction(record, summarize(record))
    assert found is not None
    return {row.name: row for row in found.rows}


def test_parts_lie_end_to_end_to_the_scale_of_the_gpu_with_the_highest_peaks_marked() -> None:
    stack = memory_stack(run(memory_gib=MEMORY))
    assert stack is not None
    assert [(part.name, part.begins, part.share) for part in stack.parts] == [
        ("weights", 0.0, 0.125),
        ("optimizer", 0.125, 0.25),
        ("overhead", 0.375, 0.0625),
    ]
    assert [part.kind for part in stack.parts] == ["0", "2", "3"]  # gradients are nothing, and keep theirs
    assert [(mark.kind, mark.text, mark.begins) for mark in stack.marks] == [
        ("allocated", "25 GiB", 0.3125),
        ("reserved", "40 GiB", 0.5),
        ("device", "44 GiB", 0.55),
    ]
    assert stack.note == "The full width is the 80 GiB of one GPU."


def test_a_small_run_on_a_large_machine_is_drawn_larger() -> None:
    stack = memory_stack(run("cpu", measured=False, memory_gib=MEMORY | {"capacity": 1000.0}))
    assert stack is not None
    assert sum(part.share for part in stack.parts) == pytest.approx(1 / 1.05)
    assert [mark.name for mark in stack.marks] == ["measured peak of the process"]
    assert stack.note == "The bar is magnified: one rank's share of this machine has 1,000 GiB."


def test_more_than_there_is_says_so() -> None:
    stack = memory_stack(run(memory_gib=MEMORY | {"capacity": 30.0}))
    assert stack is not None
    assert max(part.begins + part.share for part in stack.parts) < 1  # 35 of the measured 44
    assert stack.note == "This is more than the 30 GiB of one GPU."


def test_differences_are_of_the_prediction_from_what_was_measured() -> None:
    rows = rows_of(run(memory_gib=MEMORY, time=TIME))
    assert list(rows) == [
        "Peak memory of tensors",
        "Memory of the GPU in use",
        "Tokens per second and GPU",
        "Time of the whole training",
    ]
    assert [row.difference for row in rows.values()] == ["+20.0 %", f"{MINUS}20.5 %", "+10.0 %", "+800.0 %"]
    whole = rows["Time of the whole training"]
    assert (whole.predicted, whole.measured) == ("1 h 00 min", "6 min 40 s")


def test_an_unfinished_run_is_compared_over_the_tokens_it_saw() -> None:
    rows = rows_of(run(steps=1, memory_gib=MEMORY, time=TIME))
    part, whole = rows["Time for 400,000 tokens"], rows["Time of the whole training"]
    assert (part.predicted, part.measured, part.difference) == ("3 min 02 s", "3 min 20 s", f"{MINUS}9.1 %")
    assert (whole.predicted, whole.measured, whole.difference) == ("1 h 00 min", "\N{EN DASH}", "\N{EN DASH}")


def test_a_process_on_a_cpu_is_compared_with_everything_planned() -> None:
    rows = rows_of(run("cpu", measured=False, memory_gib=MEMORY))
    assert rows["Peak memory of a rank"].difference == "+40.0 %"  # 35 for 25
    assert rows["Tokens per second and rank"].predicted == "not estimated"


@pytest.mark.parametrize(
    ("plan", "notes"),
    [
        ({}, ["Memory: the plan has no estimate of it.", "Speed, not estimated: the plan has no estimate of it."]),
        ({"memory_gib": MEMORY, "time": TIME}, ["Speed, assumed: the share of another GPU."]),
        ({"memory_gib": MEMORY, "time": {"assumption": "not estimated: a CPU"}}, ["Speed, not estimated: a CPU."]),
    ],
    ids=["older", "estimated", "not"],
)
def test_prediction_names_its_basis(plan: dict[str, Any], notes: list[str]) -> None:
    record = run(**plan)
    found = build_prediction(record, summarize(record))
    assert found is not None
    assert found.notes == notes


def test_a_run_without_a_plan_has_no_such_section(make_run: Any, tmp_path: Path) -> None:
    record = RunRecord(folder=Path("a/b"))
    assert build_prediction(record, summarize(record)) is None
    write_report([make_run(without=("plan.json",))], tmp_path / "report.html")
    assert "Predicted and measured" not in (tmp_path / "report.html").read_text()


def test_section_is_on_the_page_for_every_plan(make_run: Any, tmp_path: Path) -> None:
    write_report([make_run()], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Predicted and measured</h2>" in page
    assert "Memory: the plan has no estimate of it." in page


def test_bar_has_a_description() -> None:
    stack = memory_stack(run(memory_gib=MEMORY))
    assert stack is not None
    svg = str(draw_stack(stack))
    assert 'aria-label="Planned memory and what was measured: weights 10 GiB, optimizer 20 GiB, overhead 5 GiB, ' in svg
    assert '<rect class="part c2" x="12.50%" y="5" width="25.00%"' in svg
    assert '<line class="stack-mark reserved" x1="50.00%" x2="50.00%"' in svg


def test_a_plan_by_measured_steps_says_so() -> None:
    record = run(memory_gib=MEMORY)
    assert record.plan is not None
    record.plan["measured"] = {"date": "2026-01-02"}
    found = build_prediction(record, summarize(record))
    assert found is not None
    assert "Memory: the peak is that of two steps measured on 2026-01-02; its parts are estimates." in found.notes
