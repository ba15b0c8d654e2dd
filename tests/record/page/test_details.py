from __future__ import annotations

from pathlib import Path
from typing import Any

from tunebook.record.page.numbers import MINUS
from tunebook.record.page.overview import build_prediction, summarize
from tunebook.record.run_record import RunRecord

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
