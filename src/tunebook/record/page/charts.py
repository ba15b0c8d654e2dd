"""The curves of a run's report as line charts in inline SVG.

No plotting library: the report is one file that must open without network and without JavaScript. A library would add
80 MB to every image and megabytes of script, or a bitmap that neither scales nor follows the reader's color scheme.
Colors are classes (`c0`..`c5`) of the page's style sheet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from tunebook.facts.methods import recorded_method
from tunebook.record.page.numbers import Unit, format_value, tick_labels
from tunebook.record.page.overview import speed_unit
from tunebook.record.run_record import RunRecord

Point = tuple[float, float | None]  # x, y; None breaks the line
Stroke = Literal["strong", "faint", "dots"]  # CSS class; faint: behind a smoothed line; dots: points on a thin line

NUM_COLORS = 6
MAX_POINTS = 600  # drawn per line: more than that is finer than a pixel
SMOOTH_FROM = 30  # points; fewer are readable without smoothing
_TOP, _BOTTOM, _RIGHT = 26, 42, 14  # margins, in SVG units (about pixels)
_CHARACTER_WIDTH = 9.2  # of the tick labels on a phone, where the style sheet sets 16 px type
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_START_AT_ZERO_BELOW = 0.5  # of the largest value: an axis whose smallest value is below this starts at zero
_OUTLIER_FACTOR = 3.0  # a value this many times the 98th percentile would flatten all others
_FLATTENED_SHARE = 0.35  # of the largest loss: a second half below it is hard to read in the same axes

# key of metrics.jsonl, title, label of the vertical axis, unit
_SIMPLE = (
    ("learning_rate", "Learning rate", "step size", Unit.plain),
    ("grad_norm", "Gradient norm", "norm before clipping", Unit.plain),
    ("tokens_per_second_per_gpu", "Throughput", "real tokens per second and {unit}", Unit.plain),
    ("mfu", "Model FLOPs utilization", "share of peak arithmetic", Unit.share),
    ("padding_share", "Padding", "share of tokens that are padding", Unit.share),
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart. Lines of the same color belong together."""

    name: str
    points: list[Point]
    color: int = 0
    stroke: Stroke = "strong"

    @property
    def style(self) -> str:
        """The CSS classes: stroke and color."""
        return f"{self.stroke} c{self.color % NUM_COLORS}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The content of a chart; `draw` makes the SVG."""

    title: str
    y_label: str
    lines: list[Line]
    unit: Unit = Unit.plain
    from_zero: bool = False
    ceiling: float | None = None  # larger values are drawn at the top edge with an arrow
    band: list[tuple[float, float, float]] = field(default_factory=list)  # x, low, high: the area between them
    mark: tuple[float, str] | None = None  # a vertical line at x, with a label
    note: str = ""

    def draw(self, width: int, height: int) -> Markup:
        """The chart as one <svg> of this size, which the page scales."""
        x, y = self._axes(width, height)
        hover = {  # from which the page's script shows the values under the pointer
            "left": x.begin, "right": x.end, "low": x.low, "high": x.high, "x": "optimizer step",
            "percent": self.unit is Unit.share,
            "lines": [
                {"name": line.name,
                 "points": [(at, None if value is None else float(f"{value:.4g}")) for at, value in thin(line.points)]}
                for line in self.lines
            ],
        }  # fmt: skip
        lines = [_drawn(line, x, y, self.ceiling) for line in self.lines]
        values = json.dumps(hover, separators=(",", ":"))
        text = _template().render(chart=self, width=width, height=height, x=x, y=y, lines=lines, hover=values)
        return Markup(text.strip().replace(">\n<", "><"))

    @property
    def summary(self) -> str:
        """The chart in a sentence, for screen readers."""
        sentences = []
        for line in self.lines:
            known = [(x, y) for x, y in line.points if y is not None]
            if known:
                ends = (known[0], known[-1])
                texts = [f"{format_value(y, self.unit)} at {format_value(x, Unit.whole)}" for x, y in ends]
                sentences.append(f"{line.name}: {', '.join(texts)}")
        return f"{self.title}, by optimizer step. " + "; ".join(sentences)

    def _axes(self, width: int, height: int) -> tuple[_Axis, _Axis]:
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points if y is not None]
        ys += [edge for _, low, high in self.band for edge in (low, high)]
        if self.ceiling is not None:
            ys = [min(y, self.ceiling) for y in ys]
        y_ticks = value_ticks(ys or [0.0, 1.0], from_zero=self.from_zero)
        y_labels, note = tick_labels(y_ticks, self.unit)
        low, high, x_ticks = step_ticks(xs, max(6, width // 100))
        x_labels, _ = tick_labels(x_ticks, Unit.whole)
        left = 12 + _CHARACTER_WIDTH * max(map(len, y_labels))
        # The last tick's label is centered at the right edge of the lines and extends beyond it.
        right = width - max(_RIGHT, _CHARACTER_WIDTH * len(x_labels[-1]) / 2)
        x_axis = _Axis(list(zip(x_ticks, x_labels, strict=True)), low, high, left, right)
        y_axis = _Axis(list(zip(y_ticks, y_labels, strict=True)), y_ticks[0], y_ticks[-1], height - _BOTTOM, _TOP, note)
        return x_axis, y_axis


@dataclass(frozen=True)
class _Axis:
    ticks: list[tuple[float, str]]  # values and labels
    low: float  # the ends in data units
    high: float
    begin: float  # the ends in SVG units
    end: float
    scale_note: str = ""

    def at(self, value: float) -> float:
        """The position of a value; values outside are at the ends."""
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return round(self.begin + (self.end - self.begin) * share, 1)


def round_ticks(low: float, high: float, num_ticks: int, whole: bool = False) -> tuple[float, list[float]]:
    """A round step (1, 2, 2.5 or 5 times a power of ten), and about `num_ticks` multiples of it in `low` to `high`."""
    rough = (high - low) / max(1, num_ticks - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in _ROUND_STEPS if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return step, [number * step for number in range(first, last + 1)]


def step_ticks(values: list[float], num_ticks: int = 6) -> tuple[float, float, list[float]]:
    """The ends and ticks of an axis of steps: to the last value; from zero unless all values are far away."""
    low, high = min(values), max(values)
    low = 0.0 if low == high or low < _START_AT_ZERO_BELOW * high else low
    high = high if high > low else low + 1
    return low, high, round_ticks(low, high, num_ticks, whole=True)[1]


def value_ticks(values: list[float], *, from_zero: bool, num_ticks: int = 5) -> list[float]:
    """The ticks of a vertical axis, also at its ends; from zero if asked to, or if the values come near zero."""
    low, high = min(values), max(values)
    if low >= 0 and (from_zero or low < _START_AT_ZERO_BELOW * high):
        low = 0.0
    if high <= low:  # one value, or all equal: add a margin on both sides
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if low == 0 else low - margin), high + margin
    step, _ = round_ticks(low, high, num_ticks)
    return [number * step for number in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def thin(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """About `limit` of the points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return points
    stretch = -(-2 * len(points) // limit)
    kept: list[Point] = [points[0]]
    for start in range(1, len(points) - 1, stretch):
        part = points[start : min(start + stretch, len(points) - 1)]
        known = [(y, index) for index, (_, y) in enumerate(part) if y is not None]
        indices = {min(known)[1], max(known)[1]} if known else set()
        indices |= {index for index, (_, y) in enumerate(part) if y is None}
        kept.extend(part[index] for index in sorted(indices))
    return [*kept, points[-1]]


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
        smoothed.append((x, None if y is None else (sums[end] - sums[first]) / (counts[end] - counts[first])))
    return smoothed, 2 * half + 1


def outlier_ceiling(values: Sequence[float]) -> float | None:
    """The value at which to cut an axis that a few outliers would stretch; None without outliers."""
    if len(values) < SMOOTH_FROM:
        return None
    ordered = sorted(values)
    usual = ordered[math.floor(0.98 * (len(ordered) - 1))]
    return 1.5 * usual if usual > 0 and ordered[-1] > _OUTLIER_FACTOR * usual else None


def _drawn(line: Line, x: _Axis, y: _Axis, ceiling: float | None) -> dict[str, Any]:
    """The path of a line, the dots on it, and the arrows above values that are off the scale."""
    path, pen, known = [], "M", []
    for at, value in thin(line.points):
        if value is not None:
            known.append((x.at(at), y.at(value), value))
            path.append(f"{pen}{known[-1][0]} {known[-1][1]}")
        pen = "M" if value is None else "L"
    has_dots = line.stroke == "dots" or len(known) == 1
    return {
        "style": line.style, "path": "".join(path),
        "dots": [place[:2] for place in known] if has_dots else [],
        "arrows": [across for across, _, value in known if ceiling is not None and value > ceiling],
    }  # fmt: skip


@cache
def _template() -> Template:
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("chart.svg.jinja")


def loss_charts(record: RunRecord) -> list[Chart]:
    """Training loss, raw and smoothed, with validation; its second half again if the first half flattens it."""
    raw, values, label = record.points("loss"), record.values("loss"), recorded_method(record.config).loss_label
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
        late = [Line(name=each, points=raw[middle:], stroke="faint"), Line(name="mean", points=smoothed[middle:])]
    if validation := _validation(record):
        lines.append(Line(name="validation", points=validation, color=1, stroke="dots"))
    invalid, ceiling = record.first_invalid_step, outlier_ceiling(values)
    charts = [
        Chart(
            title="Loss", y_label=label, lines=lines, ceiling=ceiling, note=_ceiling_note(raw, ceiling),
            mark=None if invalid is None else (invalid, f"not finite, step {invalid}"),
        )
    ]  # fmt: skip
    late_values = [y for _, y in raw[middle:] if y is not None]
    if len(raw) - middle >= SMOOTH_FROM and late_values and max(late_values) <= _FLATTENED_SHARE * max(values):
        charts.append(Chart(title="Loss, second half", y_label=label, lines=late))
    return charts


def other_charts(record: RunRecord) -> list[Chart]:
    """The other recorded curves."""
    return [*_method_charts(record), *_simple_charts(record), *_memory_chart(record)]


def _simple_charts(record: RunRecord) -> list[Chart]:
    charts = []
    for key, title, label, unit in _SIMPLE:
        points, values = record.points(key), record.values(key)
        if values:
            ceiling = outlier_ceiling(values)
            warm_up = "The first steps include the warm-up." if key == "tokens_per_second_per_gpu" else ""
            charts.append(
                Chart(
                    title=title, y_label=label.format(unit=speed_unit(record)), unit=unit, from_zero=True,
                    lines=[Line(name=title.lower(), points=points)], ceiling=ceiling,
                    note=" ".join(filter(None, (warm_up, _ceiling_note(points, ceiling)))),
                )
            )  # fmt: skip
    return charts


def _method_charts(record: RunRecord) -> list[Chart]:
    """The curves that only the run's method has, with those of the validation."""
    charts: dict[str, Chart] = {}
    for name, metric in recorded_method(record.config).metrics.items():
        chart = charts.setdefault(metric.chart, Chart(title=metric.chart, y_label=metric.y_label, lines=[]))
        color = sum(line.stroke == "strong" for line in chart.lines)
        chart.lines.append(Line(name=metric.line, points=record.points(name), color=color))
        if validation := _validation(record, f"validation_{name}"):
            name_of_line = f"{metric.line}, validation"
            chart.lines.append(Line(name=name_of_line, points=validation, color=color, stroke="dots"))
    return list(charts.values()) if record.training else []


def _validation(record: RunRecord, key: str = "validation_loss") -> list[Point]:
    return [(line["step"], line[key]) for line in record.validation if key in line]


def _ceiling_note(points: Sequence[Point], ceiling: float | None) -> str:
    if ceiling is None:
        return ""
    above = [(y, x) for x, y in points if y is not None and y > ceiling]
    largest, step = max(above)
    are = "step is" if len(above) == 1 else "steps are"
    return f"{len(above)} {are} off the scale (arrows); the largest is {format_value(largest)} at step {step:.0f}."


def _memory_chart(record: RunRecord) -> list[Chart]:
    logged = ((line["step"], line.get("memory_gib") or []) for line in record.training)
    known = ((step, [gib for gib in ranks if gib is not None]) for step, ranks in logged)
    peaks = [(step, ranks) for step, ranks in known if ranks]
    if not peaks:
        return []
    several = any(len(ranks) > 1 for _, ranks in peaks)
    name = "highest of all ranks" if several else "memory"
    return [
        Chart(
            title="Memory", y_label="peak GiB per rank", from_zero=True,
            lines=[Line(name=name, points=[(step, max(ranks)) for step, ranks in peaks])],
            band=[(step, min(ranks), max(ranks)) for step, ranks in peaks] if several else [],
            note="The shaded area reaches down to the lowest rank." if several else "",
        )
    ]  # fmt: skip
