"""The plan's estimates and the measurements side by side: memory by part, speed and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tunebook.record.page.details import Bar
from tunebook.record.page.numbers import MINUS, NO_VALUE, Unit, format_count, format_value
from tunebook.record.page.overview import Summary, is_on_gpus, speed_unit
from tunebook.record.run_record import RunRecord

_NOT_PARTS = ("total", "allocated", "capacity")
_SHORTEST = 0.4  # of the available memory: a shorter bar would be hard to read and is magnified
_PLAN_MISSING = "the plan has no estimate of it"


@dataclass(frozen=True, kw_only=True)
class MemoryStack:
    """The planned parts of the memory end to end, and the measured peaks as marks; the kinds are CSS classes."""

    parts: list[Bar]
    marks: list[Bar]
    note: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One number that was predicted and measured."""

    name: str
    predicted: str
    measured: str
    difference: str  # of the prediction from the measurement


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The section of the report."""

    stack: MemoryStack | None
    rows: list[Compared]
    notes: list[str]  # the assumptions of the predictions, or why there are none


def build_prediction(record: RunRecord, summary: Summary) -> Prediction | None:
    """Compare the plan with the measurements; None for a run without a plan."""
    if record.plan is None:
        return None
    time = record.plan.get("time") or {}
    notes = [] if record.plan.get("memory_gib") else [f"Memory: {_PLAN_MISSING}."]
    if measured := record.plan.get("measured"):
        notes.append(f"Memory: the peak is that of two steps measured on {measured['date']}; its parts are estimates.")
    notes.append(f"Speed, {time.get('assumption') or f'not estimated: {_PLAN_MISSING}'}.")
    rows = [*_memory_rows(record), *_time_rows(record, summary, time)]
    return Prediction(stack=memory_stack(record), rows=rows, notes=notes)


def memory_stack(record: RunRecord) -> MemoryStack | None:
    """The memory of one GPU or rank; None if the plan has no parts."""
    planned = (record.plan or {}).get("memory_gib") or {}
    values = {name: value or 0.0 for name, value in planned.items() if name not in _NOT_PARTS}
    if not any(values.values()):
        return None
    measured, capacity = _peaks(record), planned.get("capacity")
    longest = max([sum(values.values()), *measured.values()])
    full = max(longest, capacity if capacity and longest >= _SHORTEST * capacity else longest * 1.05)
    parts, begins = [], 0.0
    for color, (name, value) in enumerate(values.items()):
        if value:  # an empty part is omitted but keeps its color: a part has the same color in every report
            text, share = format_value(value, Unit.gib), value / full
            parts.append(Bar(name=name, text=text, begins=begins, share=share, kind=str(color % 6)))
            begins += share
    marks = [
        Bar(name=name, text=format_value(value, Unit.gib), begins=value / full, kind=kind)
        for (name, value), kind in zip(measured.items(), ("allocated", "reserved", "device"), strict=False)
    ]
    return MemoryStack(parts=parts, marks=marks, note=_scale_note(record, capacity, full))


def draw_stack(stack: MemoryStack) -> Markup:
    """The bar as SVG in the full width of the page. The page's legend names parts and marks."""
    block = Markup('<rect class="part c{}" x="{:.2f}%" y="5" width="{:.2f}%" height="26"><title>{} {}</title></rect>')
    line = Markup('<line class="stack-mark {}" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="36"><title>{} {}</title></line>')
    pieces = [
        Markup('<rect class="track" x="0" y="5" width="100%" height="26" rx="3"/>'),
        *(block.format(part.kind, 100 * part.begins, 100 * part.share, part.name, part.text) for part in stack.parts),
        *(line.format(mark.kind, 100 * mark.begins, 100 * mark.begins, mark.name, mark.text) for mark in stack.marks),
    ]
    label = ", ".join(f"{bar.name} {bar.text}" for bar in (*stack.parts, *stack.marks))
    return Markup('<svg class="stack" width="100%" height="36" role="img" aria-label="{}">{}</svg>').format(
        f"Planned memory and what was measured: {label}", Markup("").join(pieces)
    )


def _peaks(record: RunRecord) -> dict[str, float]:
    """The highest rank's measured GiB by name. Each contains the one before."""
    names = {
        "memory_gib": "measured peak of tensors" if is_on_gpus(record) else "measured peak of the process",
        "memory_reserved_gib": "measured peak reserved for them",
        "memory_device_gib": "measured in use of the GPU",
    }
    found = {
        name: [value for line in record.training for value in line.get(key) or [] if value is not None]
        for key, name in names.items()
    }
    return {name: max(values) for name, values in found.items() if values}


def _scale_note(record: RunRecord, capacity: float | None, full: float) -> str:
    if capacity is None:
        return ""
    whose, size = (
        "one GPU" if is_on_gpus(record) else "one rank's share of this machine",
        format_value(capacity, Unit.gib),
    )
    if full > capacity:
        return f"This is more than the {size} of {whose}."
    if full < capacity:
        return f"The bar is magnified: {whose} has {size}."
    return f"The full width is the {size} of {whose}."


def _memory_rows(record: RunRecord) -> list[Compared]:
    planned = (record.plan or {}).get("memory_gib") or {}
    if not planned:
        return []
    peaks = [*_peaks(record).values(), None, None, None]
    if not is_on_gpus(record):
        return [_compared("Peak memory of a rank", planned.get("total"), peaks[0], Unit.gib)]
    return [
        _compared("Peak memory of tensors", planned.get("allocated"), peaks[0], Unit.gib),
        _compared("Memory of the GPU in use", planned.get("total"), peaks[2], Unit.gib),
    ]


def _time_rows(record: RunRecord, summary: Summary, time: dict[str, Any]) -> list[Compared]:
    speed, total = time.get("tokens_per_second_per_gpu"), time.get("tokens_per_second")
    trained = sum(record.values("seconds")) or None
    is_complete = summary.num_steps is not None and summary.num_steps == summary.num_planned_steps
    rows = [
        _compared(f"Tokens per second and {speed_unit([record])}", speed, summary.tokens_per_second_per_gpu, Unit.plain)
    ]
    if not is_complete and summary.num_tokens:
        seconds = summary.num_tokens / total if total else None
        rows.append(_compared(f"Time for {format_count(summary.num_tokens)} tokens", seconds, trained, Unit.seconds))
    planned = time["hours"] * 3600 if time.get("hours") is not None else None
    rows.append(_compared("Time of the whole training", planned, trained if is_complete else None, Unit.seconds))
    return rows


def _compared(name: str, predicted: float | None, measured: float | None, unit: Unit) -> Compared:
    difference = NO_VALUE
    if predicted is not None and measured:
        difference = format_value(predicted / measured - 1, Unit.share)
        difference = difference if difference.startswith(MINUS) else f"+{difference}"
    return Compared(
        name=name,
        predicted="not estimated" if predicted is None else format_value(predicted, unit),
        measured=format_value(measured, unit),
        difference=difference,
    )
