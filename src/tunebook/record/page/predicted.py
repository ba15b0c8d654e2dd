"""What the plan predicted beside what was measured: memory part by part, speed and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tunebook.record.page.numbers import NO_VALUE, Unit, format_count, format_value
from tunebook.record.page.summary import Summary
from tunebook.record.run_record import RunRecord

_NOT_PARTS = ("total", "allocated", "capacity")
# A bar of less than this share of the memory there is would be too short to read.
_SHORTEST = 0.4
_PLAN_MISSING = "the plan has no estimate of it"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the memory that was planned, as a stretch of the bar."""

    name: str
    text: str
    start: float  # share of the bar, 0 to 1
    width: float
    colour: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something measured, marked on the bar."""

    name: str
    text: str
    at: float  # share of the bar, 0 to 1
    kind: str  # the CSS class of its line


@dataclass(frozen=True, kw_only=True)
class MemoryStack:
    """The planned memory end to end, with what was measured marked on it."""

    parts: list[Part]
    marks: list[Mark]
    note: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One number that was predicted and measured."""

    name: str
    predicted: str
    measured: str
    difference: str  # of the prediction from what was measured


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The whole section; empty where there is no plan."""

    stack: MemoryStack | None
    rows: list[Compared]
    notes: list[str]  # what the predictions rest on, or why there are none


def build_prediction(record: RunRecord, summary: Summary) -> Prediction | None:
    """Lay the plan beside what was measured; None for a run without a plan."""
    if record.plan is None:
        return None
    time = record.plan.get("time") or {}
    notes = [] if record.plan.get("memory_gib") else [f"Memory: {_PLAN_MISSING}."]
    notes.append(_speed_note(time))
    rows = [*_memory_rows(record), *_time_rows(record, summary, time)]
    return Prediction(stack=memory_stack(record), rows=rows, notes=notes)


def memory_stack(record: RunRecord) -> MemoryStack | None:
    """The parts of one GPU or rank end to end; None where the plan knows none."""
    planned = (record.plan or {}).get("memory_gib") or {}
    values = {name: value or 0.0 for name, value in planned.items() if name not in _NOT_PARTS}
    if not any(values.values()):
        return None
    measured = _peaks(record)
    capacity = planned.get("capacity")
    longest = max([sum(values.values()), *measured.values()])
    full = capacity if capacity and longest >= _SHORTEST * capacity else longest * 1.05
    full = max(full, longest)
    parts, start = [], 0.0
    for colour, (name, value) in enumerate(values.items()):
        share = value / full
        if not value:
            continue  # but it keeps its colour, so that a part looks the same in every report
        parts.append(Part(name=name, text=format_value(value, Unit.gib), start=start, width=share, colour=colour))
        start += share
    marks = [
        Mark(name=name, text=format_value(value, Unit.gib), at=value / full, kind=kind)
        for (name, value), kind in zip(measured.items(), ("allocated", "reserved", "device"), strict=False)
    ]
    return MemoryStack(parts=parts, marks=marks, note=_scale_note(record, capacity, full))


def draw_stack(stack: MemoryStack) -> Markup:
    """The bar as SVG as wide as the page has room; the legend beside it names parts and marks."""
    pieces = [Markup('<rect class="track" x="0" y="5" width="100%" height="26" rx="3"/>')]
    block = Markup('<rect class="part c{}" x="{:.2f}%" y="5" width="{:.2f}%" height="26"><title>{} {}</title></rect>')
    line = Markup('<line class="stack-mark {}" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="36"><title>{} {}</title></line>')
    for part in stack.parts:
        pieces.append(block.format(part.colour % 6, 100 * part.start, 100 * part.width, part.name, part.text))
    for mark in stack.marks:
        pieces.append(line.format(mark.kind, 100 * mark.at, 100 * mark.at, mark.name, mark.text))
    said = ", ".join(
        [f"{part.name} {part.text}" for part in stack.parts] + [f"{mark.name} {mark.text}" for mark in stack.marks]
    )
    return Markup('<svg class="stack" width="100%" height="36" role="img" aria-label="{}">{}</svg>').format(
        f"Planned memory and what was measured: {said}", Markup("").join(pieces)
    )


def _peaks(record: RunRecord) -> dict[str, float]:
    """The highest rank's measured GiB by name, in the order in which they contain each other."""
    names = {
        "memory_gib": "measured peak of tensors" if _is_gpu(record) else "measured peak of the process",
        "memory_reserved_gib": "measured peak reserved for them",
        "memory_device_gib": "measured in use of the GPU",
    }
    found = {
        name: [value for line in record.training for value in line.get(key) or [] if value is not None]
        for key, name in names.items()
    }
    return {name: max(values) for name, values in found.items() if values}


def _is_gpu(record: RunRecord) -> bool:
    return ((record.plan or {}).get("hardware") or {}).get("generation") != "cpu"


def _scale_note(record: RunRecord, capacity: float | None, full: float) -> str:
    if capacity is None:
        return ""
    whose = "one GPU" if _is_gpu(record) else "one rank, which has its share of this machine,"
    if full > capacity:
        return f"This is more than the {format_value(capacity, Unit.gib)} of {whose.rstrip(',')}."
    if full < capacity:
        return f"The bar is drawn larger than to scale: {whose} has {format_value(capacity, Unit.gib)}."
    return f"The full width is the {format_value(capacity, Unit.gib)} of {whose.rstrip(',')}."


def _memory_rows(record: RunRecord) -> list[Compared]:
    planned = (record.plan or {}).get("memory_gib") or {}
    if not planned:
        return []
    peaks = list(_peaks(record).values())
    if not _is_gpu(record):
        return [_compared("Peak memory of a rank", planned.get("total"), peaks[0] if peaks else None, Unit.gib)]
    device = peaks[2] if len(peaks) > 2 else None
    return [
        _compared("Peak memory of tensors", planned.get("allocated"), peaks[0] if peaks else None, Unit.gib),
        _compared("Memory of the GPU in use", planned.get("total"), device, Unit.gib),
    ]


def _time_rows(record: RunRecord, summary: Summary, time: dict[str, Any]) -> list[Compared]:
    speed, total = time.get("tokens_per_second_per_gpu"), time.get("tokens_per_second")
    unit = "GPU" if _is_gpu(record) else "rank"
    trained = sum(record.values("seconds")) or None
    is_whole = summary.num_steps is not None and summary.num_steps == summary.num_planned_steps
    rows = [_compared(f"Tokens per second and {unit}", speed, summary.tokens_per_second_per_gpu, Unit.plain)]
    if not is_whole and summary.num_tokens:
        seconds = summary.num_tokens / total if total else None
        rows.append(_compared(f"Time for {format_count(summary.num_tokens)} tokens", seconds, trained, Unit.seconds))
    whole = time["hours"] * 3600 if time.get("hours") is not None else None
    rows.append(_compared("Time of the whole training", whole, trained if is_whole else None, Unit.seconds))
    return rows


def _compared(name: str, predicted: float | None, measured: float | None, unit: Unit) -> Compared:
    difference = NO_VALUE
    if predicted is not None and measured:
        difference = format_value(predicted / measured - 1, Unit.share)
        difference = difference if difference.startswith("\N{MINUS SIGN}") else f"+{difference}"
    return Compared(
        name=name,
        predicted="not estimated" if predicted is None else format_value(predicted, unit),
        measured=format_value(measured, unit),
        difference=difference,
    )


def _speed_note(time: dict[str, Any]) -> str:
    text = str(time.get("assumption") or f"not estimated: {_PLAN_MISSING}")
    return f"Speed, {text}."
