from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tunebook.record.page.numbers import MINUS
from tunebook.record.page.overview import build_prediction, memory_bars, start_bars, summarize
from tunebook.record.run_record import RunRecord

START_UP = {
    "launched": "2026-11-21T07:18:07.000+00:00",
    "launcher": {"start_python": 1.0, "plan": 3.0},
    "rank": {"launch": 4.0, "model": 8.0, "a_later_phase": 0.0, "first_step": 4.0},
    "first_step_s": 20.0,
}
PARTS = {"weights": 10.0, "gradients": 0.0, "optimizer": 20.0, "overhead": 5.0}
MEMORY = {**PARTS, "total": 35.0, "allocated": 30.0, "capacity": 80.0}
TIME = {
    "tokens_per_second_per_gpu": 1_100.0, "tokens_per_second": 2_200.0, "tokens": 7_920_000.0, "hours": 1.0,
    "gpu_hours": 2.0, "efficiency": 0.4, "peak_tflops": 989.0, "assumption": "assumed: the share of another GPU",
}  # fmt: skip


def predicted(generation: str = "hopper", *, steps: int = 2, **plan: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"tokens_per_second_per_gpu": 1_000.0, "memory_gib": [24.0, 25.0]}
    if generation != "cpu":
        line |= {"memory_reserved_gib": [28.0, 40.0], "memory_device_gib": [44.0, 43.0]}
    training = [line | {"step": step, "tokens_seen": 400_000 * step, "seconds": 200.0} for step in range(1, steps + 1)]
    content = {"hardware": {"generation": generation}, "batch": {"total_steps": 2}} | plan
    record = RunRecord(folder=Path("a/b"), plan=content, training=training)
    found = build_prediction(record, summarize(record))
    assert found is not None
    return found


def test_differences_are_of_the_prediction_from_what_was_measured() -> None:
    rows = predicted(memory_gib=MEMORY, time=TIME)["rows"]
    assert [row[3] for row in rows] == ["+20.0 %", f"{MINUS}20.5 %", "+10.0 %", "+800.0 %"]
    assert rows[-1][:3] == ("Time of the whole training", "1 h 00 min", "6 min 40 s")


def test_memory_is_drawn_against_the_gpus_size_and_the_plan() -> None:
    record = RunRecord(
        folder=Path("a/b"),
        plan={
            "hardware": {"generation": "hopper", "memory_gib": 80.0},
            "memory_gib": {"allocated": 60.0, "total": 70.0},
        },
        training=[{"step": 1, "memory_gib": [20.0, 40.0]}],
    )
    bars, note = memory_bars(record, summarize(record))
    assert [(bar.name, bar.share) for bar in bars] == [("rank 0", 0.25), ("rank 1", 0.5), ("planned", 0.75)]
    assert note == "The full width is one GPU's 80 GiB."
    record = replace(record, training=[{"step": 1, "memory_gib": [20.0] * 64}])
    bars, _ = memory_bars(record, summarize(record))
    assert [bar.name for bar in bars[:3]] == ["lowest rank", "middle", "highest rank"]


def test_phases_stand_one_after_the_other() -> None:
    bars = start_bars({"start_up": START_UP})
    assert [(bar.kind, bar.begins, bar.share) for bar in bars] == [
        ("launcher", 0.0, 0.05), ("launcher", 0.05, 0.15), ("rank", 0.2, 0.2), ("rank", 0.4, 0.4),
        ("rank", 0.8, 0.0), ("rank", 0.8, 0.2),
    ]  # fmt: skip
    assert [bar.text for bar in bars] == ["1.0 s", "3.0 s", "4.0 s", "8.0 s", "0.0 s", "4.0 s"]
    for nothing in ({}, {"start_up": START_UP | {"rank": {}, "first_step_s": None}}):
        assert start_bars(nothing) == []
