"""The curves of a report, for one run and for several runs in shared axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunebook.record.page.charts import NUM_COLORS, NUM_DASHES, Chart, Line, Mark, Point, Stroke
from tunebook.record.page.numbers import Unit, format_value
from tunebook.record.page.overview import speed_unit
from tunebook.record.run_record import RunRecord

_SMOOTH_FROM = 30  # points; fewer are readable without smoothing
_FLATTENED_SHARE = 0.35  # of the largest loss: a second half below it is hard to read in the same axes
_OUTLIER_FACTOR = 3.0  # a value this many times the 98th percentile would flatten all others

# key of metrics.jsonl, title, label of the vertical axis, unit
_SIMPLE = (
    ("learning_rate", "Learning rate", "step size", Unit.plain),
    ("grad_norm", "Gradient norm", "norm before clipping", Unit.plain),
    ("tokens_per_second_per_gpu", "Throughput", "real tokens per second and {unit}", Unit.plain),
    ("mfu", "Model FLOPs utilization", "share of peak arithmetic", Unit.share),
    ("padding_share", "Padding", "share of tokens that are padding", Unit.share),
)


def loss_chart(record: RunRecord) -> Chart | None:
    """Training loss, raw and smoothed, validation loss as points, and a mark at a loss that was not finite."""
    raw = record.points("loss")
    if not raw:
        return None
    lines = [Line(name="training", points=raw)]
    if len(raw) >= _SMOOTH_FROM:
        smoothed, span = smooth(raw)
        lines = [
            Line(name=f"training, {_each(record)}", points=raw, stroke=Stroke.faint),
            Line(name=f"training, mean of {span} logged steps", points=smoothed),
        ]
    validation = [(line["step"], line["validation_loss"]) for line in record.validation]
    if validation:
        lines.append(Line(name="validation", points=validation, color=1, stroke=Stroke.dots))
    invalid = record.first_invalid_step
    marks = [] if invalid is None else [Mark(x=invalid, text=f"not finite, step {invalid}")]
    ceiling = outlier_ceiling(record.values("loss"))
    note = _ceiling_note(raw, ceiling)
    return Chart(title="Loss", y_label="loss per trained token", lines=lines, marks=marks, ceiling=ceiling, note=note)


def late_loss_chart(record: RunRecord) -> Chart | None:
    """The second half of the training loss in its own axes, if the first half would flatten it."""
    points = record.points("loss")
    late, values = points[len(points) // 2 :], record.values("loss")
    late_values = [y for _, y in late if y is not None]
    if len(late) < _SMOOTH_FROM or not late_values or max(late_values) > _FLATTENED_SHARE * max(values):
        return None
    smoothed, _ = smooth(points)
    lines = [
        Line(name=_each(record), points=late, stroke=Stroke.faint),
        Line(name="mean", points=smoothed[len(points) // 2 :]),
    ]
    return Chart(title="Loss, second half", y_label="loss per trained token", lines=lines)


def _each(record: RunRecord) -> str:
    """The steps that a point of the raw loss covers: it is the mean since the previous point."""
    every = record.log_every_steps
    if every is None:
        return "each logged step"
    return "each step" if every == 1 else f"mean of each {every} steps"


def other_charts(record: RunRecord) -> tuple[list[Chart], list[str]]:
    """The other recorded curves, and the titles of those that were not recorded."""
    late = late_loss_chart(record)
    charts, missing = [late] if late else [], []
    for key, title, label, unit in _SIMPLE:
        points = record.points(key)
        if any(y is not None for _, y in points):
            label = label.format(unit=speed_unit([record]))
            charts.append(_simple_chart(key, title, label, unit, points))
        else:
            missing.append(title)
    memory = _memory_chart(record)
    if memory is None:
        missing.append("Memory")
    else:
        charts.append(memory)
    return charts, missing


def overlaid_charts(records: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """The curves of several runs in shared axes: the loss over steps and over tokens, then the others."""
    charts = []
    for over, label in (("step", "optimizer step"), ("tokens_seen", "tokens seen")):
        title = "Loss over steps" if over == "step" else "Loss over tokens"
        lines = _overlay(records, names, "loss", over, smoothed=True)
        charts.append(Chart(title=title, y_label="loss per trained token", lines=lines, x_label=label))
    validation = [
        Line(name=name, points=[(line["step"], line["validation_loss"]) for line in record.validation], color=index,
             dash=dash_of_run(index), stroke=Stroke.dots)
        for index, (record, name) in enumerate(zip(records, names, strict=True)) if record.validation
    ]  # fmt: skip
    charts.append(Chart(title="Validation loss", y_label="loss per trained token", lines=validation))
    for key, title, label, unit in _SIMPLE:
        lines = _overlay(records, names, key, "step", smoothed=False)
        values = [y for line in lines for _, y in line.points if y is not None]
        label = label.format(unit=speed_unit(records))
        charts.append(
            Chart(title=title, y_label=label, lines=lines, unit=unit, from_zero=True, ceiling=outlier_ceiling(values))
        )
    return [chart for chart in charts if any(y is not None for line in chart.lines for _, y in line.points)]


def dash_of_run(index: int) -> int:
    """The dash pattern of one of several runs. Neighbors differ, so that equal curves do not hide each other."""
    return (index + index // NUM_COLORS) % NUM_DASHES


def smooth(points: Sequence[Point]) -> tuple[list[Point], int]:
    """The centered moving average over about a twentieth of the points, and the width of its window.

    An average over past values lags behind a falling loss and shows it too high. The window shrinks at both ends.
    """
    half = max(2, round(len(points) / 40))
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    smoothed: list[Point] = []
    for index, (x, y) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        first, end = index - reach, index + reach + 1
        mean = None if y is None else (sums[end] - sums[first]) / (counts[end] - counts[first])
        smoothed.append((x, mean))
    return smoothed, 2 * half + 1


def outlier_ceiling(values: Sequence[float]) -> float | None:
    """The value at which to cut an axis that a few outliers would stretch; None without outliers."""
    if len(values) < _SMOOTH_FROM:
        return None
    ordered = sorted(values)
    usual = ordered[math.floor(0.98 * (len(ordered) - 1))]
    return 1.5 * usual if usual > 0 and ordered[-1] > _OUTLIER_FACTOR * usual else None


def _simple_chart(key: str, title: str, label: str, unit: Unit, points: list[Point]) -> Chart:
    values = [y for _, y in points if y is not None]
    ceiling = outlier_ceiling(values) if key == "grad_norm" else None
    note = _ceiling_note(points, ceiling)
    if key == "tokens_per_second_per_gpu":
        note = "The first steps include the warm-up."
    return Chart(
        title=title, y_label=label, lines=[Line(name=title.lower(), points=points)], unit=unit, from_zero=True,
        ceiling=ceiling, note=note,
    )  # fmt: skip


def _ceiling_note(points: Sequence[Point], ceiling: float | None) -> str:
    if ceiling is None:
        return ""
    above = [(y, x) for x, y in points if y is not None and y > ceiling]
    largest, step = max(above)
    are = "step is" if len(above) == 1 else "steps are"
    return f"{len(above)} {are} off the scale (arrows); the largest is {format_value(largest)} at step {step:.0f}."


def _memory_chart(record: RunRecord) -> Chart | None:
    ranks = [(line["step"], line["memory_gib"]) for line in record.training if line.get("memory_gib")]
    known = [(step, [value for value in values if value is not None]) for step, values in ranks]
    known = [(step, values) for step, values in known if values]
    if not known:
        return None
    highest: list[Point] = [(step, max(values)) for step, values in known]
    several = any(len(values) > 1 for _, values in known)
    band: list[tuple[float, float, float]] = [(step, min(values), max(values)) for step, values in known]
    name = "highest of all ranks" if several else "memory"
    return Chart(
        title="Memory", y_label="peak GiB per rank", lines=[Line(name=name, points=highest)], unit=Unit.plain,
        from_zero=True, band=band if several else [],
        note="The shaded area reaches down to the lowest rank." if several else "",
    )  # fmt: skip


def _overlay(records: Sequence[RunRecord], names: Sequence[str], key: str, over: str, smoothed: bool) -> list[Line]:
    lines = []
    for index, (record, name) in enumerate(zip(records, names, strict=True)):
        points = record.points(key, over)
        if smoothed and len(points) >= _SMOOTH_FROM:
            points, _ = smooth(points)
        if points:
            lines.append(Line(name=name, points=points, color=index, dash=dash_of_run(index)))
    return lines
