"""The curves of a report, for one run and for several runs in shared axes."""

from __future__ import annotations

from collections.abc import Sequence

from tunebook.record.page.charts import (
    NUM_COLORS,
    NUM_DASHES,
    SMOOTH_FROM,
    Chart,
    Line,
    Point,
    Stroke,
    outlier_ceiling,
    smooth,
)
from tunebook.record.page.numbers import Unit, format_value
from tunebook.record.page.overview import speed_unit
from tunebook.record.run_record import RunRecord

_FLATTENED_SHARE = 0.35  # of the largest loss: a second half below it is hard to read in the same axes
_LOSS = "loss per trained token"

# key of metrics.jsonl, title, label of the vertical axis, unit
_SIMPLE = (
    ("learning_rate", "Learning rate", "step size", Unit.plain),
    ("grad_norm", "Gradient norm", "norm before clipping", Unit.plain),
    ("tokens_per_second_per_gpu", "Throughput", "real tokens per second and {unit}", Unit.plain),
    ("mfu", "Model FLOPs utilization", "share of peak arithmetic", Unit.share),
    ("padding_share", "Padding", "share of tokens that are padding", Unit.share),
)


def loss_charts(record: RunRecord) -> list[Chart]:
    """Training loss, raw and smoothed, with validation; its second half again if the first half flattens it."""
    raw, values = record.points("loss"), record.values("loss")
    if not raw:
        return []
    every, middle = record.log_every_steps, len(raw) // 2
    # A point is the mean since the previous point.
    each = "each logged step" if every is None else "each step" if every == 1 else f"mean of each {every} steps"
    lines, late = [Line(name="training", points=raw)], []
    if len(raw) >= SMOOTH_FROM:
        smoothed, span = smooth(raw)
        lines = [
            Line(name=f"training, {each}", points=raw, stroke="faint"),
            Line(name=f"training, mean of {span} logged steps", points=smoothed),
        ]
        late = [
            Line(name=each, points=raw[middle:], stroke="faint"),
            Line(name="mean", points=smoothed[middle:]),
        ]
    if validation := _validation(record):
        lines.append(Line(name="validation", points=validation, color=1, stroke="dots"))
    invalid, ceiling = record.first_invalid_step, outlier_ceiling(values)
    charts = [
        Chart(
            title="Loss", y_label=_LOSS, lines=lines, ceiling=ceiling, note=_ceiling_note(raw, ceiling),
            mark=None if invalid is None else (invalid, f"not finite, step {invalid}"),
        )
    ]  # fmt: skip
    late_values = [y for _, y in raw[middle:] if y is not None]
    if len(raw) - middle >= SMOOTH_FROM and late_values and max(late_values) <= _FLATTENED_SHARE * max(values):
        charts.append(Chart(title="Loss, second half", y_label=_LOSS, lines=late))
    return charts


def other_charts(record: RunRecord) -> tuple[list[Chart], list[str]]:
    """The other recorded curves, and the titles of those that were not recorded."""
    charts = [*_simple_charts([record], None), *_memory_chart(record)]
    titles = {chart.title for chart in charts}
    return charts, [title for title in (*(title for _, title, _, _ in _SIMPLE), "Memory") if title not in titles]


def overlaid_charts(records: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """The curves of several runs in shared axes: the loss over steps and over tokens, then the others."""

    def chart(title: str, points: list[list[Point]], x_label: str = "optimizer step") -> Chart:
        stroke: Stroke = "dots" if title == "Validation loss" else "strong"
        return Chart(title=title, y_label=_LOSS, x_label=x_label, lines=_overlay(points, names, stroke))

    def losses(over: str) -> list[list[Point]]:
        found = (record.points("loss", over) for record in records)
        return [smooth(points)[0] if len(points) >= SMOOTH_FROM else points for points in found]

    charts = [
        chart("Loss over steps", losses("step")),
        chart("Loss over tokens", losses("tokens_seen"), "tokens seen"),
        chart("Validation loss", [_validation(record) for record in records]),
    ]
    return [chart for chart in charts if any(y is not None for line in chart.lines for _, y in line.points)] + (
        _simple_charts(records, names)
    )


def dash_of_run(index: int) -> int:
    """The dash pattern of one of several runs. Neighbors differ, so that equal curves do not hide each other."""
    return (index + index // NUM_COLORS) % NUM_DASHES


def _simple_charts(records: Sequence[RunRecord], names: Sequence[str] | None) -> list[Chart]:
    """The curves of one run, or of several in shared axes if they have names."""
    charts = []
    for key, title, label, unit in _SIMPLE:
        points = [record.points(key) for record in records]
        values = [y for one in points for _, y in one if y is not None]
        if values:
            ceiling = outlier_ceiling(values)
            warm_up = "The first steps include the warm-up." if key == "tokens_per_second_per_gpu" else ""
            note = "" if names else " ".join(filter(None, (warm_up, _ceiling_note(points[0], ceiling))))
            charts.append(
                Chart(
                    title=title, y_label=label.format(unit=speed_unit(records)), unit=unit, from_zero=True,
                    lines=_overlay(points, names or [title.lower()]), ceiling=ceiling, note=note,
                )
            )  # fmt: skip
    return charts


def _validation(record: RunRecord) -> list[Point]:
    return [(line["step"], line["validation_loss"]) for line in record.validation]


def _overlay(curves: Sequence[list[Point]], names: Sequence[str], stroke: Stroke = "strong") -> list[Line]:
    return [
        Line(name=name, points=points, color=index, dash=dash_of_run(index), stroke=stroke)
        for index, (points, name) in enumerate(zip(curves, names, strict=True))
        if points
    ]


def _ceiling_note(points: Sequence[Point], ceiling: float | None) -> str:
    if ceiling is None:
        return ""
    above = [(y, x) for x, y in points if y is not None and y > ceiling]
    largest, step = max(above)
    are = "step is" if len(above) == 1 else "steps are"
    return f"{len(above)} {are} off the scale (arrows); the largest is {format_value(largest)} at step {step:.0f}."


def _memory_chart(record: RunRecord) -> list[Chart]:
    found = [
        (line["step"], [gib for gib in line.get("memory_gib") or [] if gib is not None]) for line in record.training
    ]
    known = [(step, ranks) for step, ranks in found if ranks]
    if not known:
        return []
    several = any(len(ranks) > 1 for _, ranks in known)
    highest = Line(
        name="highest of all ranks" if several else "memory", points=[(step, max(ranks)) for step, ranks in known]
    )
    return [
        Chart(
            title="Memory", y_label="peak GiB per rank", lines=[highest], from_zero=True,
            band=[(step, min(ranks), max(ranks)) for step, ranks in known] if several else [],
            note="The shaded area reaches down to the lowest rank." if several else "",
        )
    ]  # fmt: skip
