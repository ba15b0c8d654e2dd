"""The lower part of a run's report: predictions, memory by rank, start-up, data, records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebook.record.page.numbers import MINUS, NO_VALUE, Unit, format_count, format_value
from tunebook.record.page.overview import Summary, is_on_gpus, speed_unit
from tunebook.record.run_record import RunRecord

_MAX_RANK_BARS = 16  # more ranks are summarized
_NOT_PARTS = ("total", "allocated", "capacity")  # of the planned memory
_SHORTEST = 0.4  # of the available memory: a shorter bar would be hard to read and is magnified
_PLAN_MISSING = "the plan has no estimate of it"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A labelled stretch of a horizontal bar, as shares of its full width."""

    name: str
    text: str
    share: float = 0.0
    begins: float = 0.0
    kind: str = ""  # CSS class


def build_prediction(record: RunRecord, summary: Summary) -> dict[str, Any] | None:
    """The plan's estimates beside the measurements; None for a run without a plan.

    `parts` of the planned memory of one GPU or rank, end to end; `marks` of the measured peaks; `scale` of both; `rows`
    of name, predicted, measured and the difference; `notes` on what the predictions assume, or why there are none.
    """
    if record.plan is None:
        return None
    planned, time = record.plan.get("memory_gib") or {}, record.plan.get("time") or {}
    notes = [] if planned else [f"Memory: {_PLAN_MISSING}."]
    if measured := record.plan.get("measured"):
        notes.append(f"Memory: the peak is that of two steps measured on {measured['date']}; its parts are estimates.")
    notes.append(f"Speed, {time.get('assumption') or f'not estimated: {_PLAN_MISSING}'}.")
    keys = ("memory_gib", "memory_reserved_gib", "memory_device_gib")
    found = [[gib for line in record.training for gib in line.get(key) or [] if gib is not None] for key in keys]
    peaks = [max(values, default=None) for values in found]
    parts, marks, scale = _memory_stack(planned, peaks, is_on_gpus(record))
    rows = []
    if planned and not is_on_gpus(record):
        rows = [_compared("Peak memory of a rank", planned.get("total"), peaks[0], Unit.gib)]
    elif planned:
        rows = [
            _compared("Peak memory of tensors", planned.get("allocated"), peaks[0], Unit.gib),
            _compared("Memory of the GPU in use", planned.get("total"), peaks[2], Unit.gib),
        ]
    rows += _time_rows(record, summary, time)
    return {"parts": parts, "marks": marks, "scale": scale, "rows": rows, "notes": notes}


def _memory_stack(
    planned: dict[str, float | None], peaks: list[float | None], is_gpu: bool
) -> tuple[list[Bar], list[Bar], str]:
    values = {name: value or 0.0 for name, value in planned.items() if name not in _NOT_PARTS}
    if not any(values.values()):
        return [], [], ""
    names = (
        "measured peak of tensors" if is_gpu else "measured peak of the process", "measured peak reserved for them",
        "measured in use of the GPU",
    )  # fmt: skip
    measured = {
        (name, kind): gib
        for name, kind, gib in zip(names, ("allocated", "reserved", "device"), peaks, strict=True)
        if gib is not None
    }
    longest, capacity = max([sum(values.values()), *measured.values()]), planned.get("capacity")
    full = max(longest, capacity if capacity and longest >= _SHORTEST * capacity else longest * 1.05)
    parts, begins = [], 0.0
    for color, (name, value) in enumerate(values.items()):
        if value:  # an empty part is omitted but keeps its color: a part has the same color in every report
            text, share = format_value(value, Unit.gib), value / full
            parts.append(Bar(name=name, text=text, begins=begins, share=share, kind=str(color % 6)))
            begins += share
    marks = [
        Bar(name=name, text=format_value(value, Unit.gib), begins=value / full, kind=kind)
        for (name, kind), value in measured.items()
    ]
    if capacity is None:
        return parts, marks, ""
    whose, size = "one GPU" if is_gpu else "one rank's share of this machine", format_value(capacity, Unit.gib)
    scale = f"The full width is the {size} of {whose}."
    if full > capacity:
        scale = f"This is more than the {size} of {whose}."
    elif full < capacity:
        scale = f"The bar is magnified: {whose} has {size}."
    return parts, marks, scale


def _time_rows(record: RunRecord, summary: Summary, time: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    speed, total = time.get("tokens_per_second_per_gpu"), time.get("tokens_per_second")
    trained = sum(record.values("seconds")) or None
    is_complete = summary.num_steps is not None and summary.num_steps == summary.num_planned_steps
    name = f"Tokens per second and {speed_unit([record])}"
    rows = [_compared(name, speed, summary.tokens_per_second_per_gpu, Unit.plain)]
    if not is_complete and summary.num_tokens:
        seconds = summary.num_tokens / total if total else None
        rows.append(_compared(f"Time for {format_count(summary.num_tokens)} tokens", seconds, trained, Unit.seconds))
    planned = time["hours"] * 3600 if time.get("hours") is not None else None
    return [*rows, _compared("Time of the whole training", planned, trained if is_complete else None, Unit.seconds)]


def _compared(name: str, predicted: float | None, measured: float | None, unit: Unit) -> tuple[str, str, str, str]:
    difference = NO_VALUE
    if predicted is not None and measured:
        difference = format_value(predicted / measured - 1, Unit.share)
        difference = difference if difference.startswith(MINUS) else f"+{difference}"
    text = "not estimated" if predicted is None else format_value(predicted, unit)
    return name, text, format_value(measured, unit), difference


def memory_bars(record: RunRecord, summary: Summary) -> tuple[list[Bar], str]:
    """The peak of every rank, the planned memory, and a sentence on the scale."""
    plan, peaks = record.plan or {}, summary.peak_memory_gib
    if not peaks:
        return [], ""
    is_gpu, capacity = is_on_gpus(record), (plan.get("hardware") or {}).get("memory_gib")
    planned = (plan.get("memory_gib") or {}).get("allocated" if is_gpu else "total")  # as the peaks are recorded
    named = [(f"rank {rank}", peak) for rank, peak in enumerate(peaks)]
    if len(peaks) > _MAX_RANK_BARS:
        ordered = sorted(peaks)
        named = [("lowest rank", ordered[0]), ("middle", ordered[len(ordered) // 2]), ("highest rank", ordered[-1])]
    if planned is not None:
        named.append(("planned", planned))
    longest = capacity or max(value for _, value in named) or 1.0
    bars = [Bar(name=name, text=format_value(gib, Unit.gib), share=min(1.0, gib / longest)) for name, gib in named]
    whose = "one GPU's" if is_gpu else "one rank's share of this machine's"
    return bars, f"The full width is {whose} {format_value(capacity, Unit.gib)}." if capacity else ""


def start_bars(manifest: dict[str, Any] | None) -> list[Bar]:
    """The phases to the first optimizer step; none if that step was not reached."""
    found = (manifest or {}).get("start_up") or {}
    total: float | None = found.get("first_step_s")
    if not total:
        return []
    begins, bars = 0.0, []
    for kind in ("launcher", "rank"):
        for phase, seconds in found[kind].items():
            share, text = min(1.0, seconds / total), format_value(seconds, Unit.seconds)
            bars.append(Bar(name=phase, text=text, begins=min(1.0, begins / total), share=share, kind=kind))
            begins += seconds
    return bars


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested sections as (dotted key, value as text), in their order."""
    if isinstance(value, dict) and value:
        start = f"{prefix}." if prefix else ""
        return [line for key, item in value.items() for line in flatten(item, f"{start}{key}")]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [line for index, item in enumerate(value) for line in flatten(item, f"{prefix}[{index}]")]
    if isinstance(value, list):
        return [(prefix, " ".join(map(str, value)) or NO_VALUE)]
    return [(prefix, NO_VALUE if value is None or value == {} else str(value))]
