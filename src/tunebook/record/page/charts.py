"""Line charts as inline SVG.

No plotting library: the report is one file that must open without network and without JavaScript. A library would add
80 MB to every image and megabytes of script, or a bitmap that neither scales nor follows the reader's color scheme.
Colors are classes (`c0`..`c5`) of the page's style sheet.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum

from markupsafe import Markup

from tunebook.record.page.numbers import Unit, format_value, tick_labels

_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_START_AT_ZERO_BELOW = 0.5  # of the largest value: an axis whose smallest value is below this starts at zero


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: its ends in data units, its ticks, and the scale of their labels."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]
    scale_note: str

    def share(self, value: float) -> float:
        """The position of a value from 0 to 1; values outside are at the ends."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def round_ticks(low: float, high: float, num_ticks: int, whole: bool = False) -> list[float]:
    """About `num_ticks` multiples of a round step (1, 2, 2.5 or 5 times a power of ten) within `low` to `high`."""
    rough = (high - low) / max(1, num_ticks - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in _ROUND_STEPS if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def step_axis(values: list[float], num_ticks: int = 6) -> Axis:
    """The horizontal axis of steps or tokens, to exactly the last value; from zero unless all values are far away."""
    low, high = min(values), max(values)
    low = 0.0 if low == high or low < _START_AT_ZERO_BELOW * high else low
    if high <= low:
        high = low + 1
    return _axis(low, high, round_ticks(low, high, num_ticks, whole=True), Unit.whole)


def value_axis(values: list[float], unit: Unit, from_zero: bool, num_ticks: int = 5) -> Axis:
    """The vertical axis with round ends; it starts at zero if asked to, or if the values come near zero."""
    low, high = min(values), max(values)
    if low >= 0 and (from_zero or low < _START_AT_ZERO_BELOW * high):
        low = 0.0
    if high <= low:  # one value, or all equal: add a margin on both sides
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if low == 0 else low - margin), high + margin
    ticks = round_ticks(low, high, num_ticks)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    # Extend to the next tick on both sides, so that the frame has a number at each end.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return _axis(ticks[0], ticks[-1], ticks, unit)


def _axis(low: float, high: float, ticks: list[float], unit: Unit) -> Axis:
    labels, note = tick_labels(ticks, unit)
    return Axis(low=low, high=high, ticks=ticks, labels=labels, scale_note=note)


Point = tuple[float, float | None]  # x, y; None breaks the line

NUM_COLORS = 6
NUM_DASHES = 3
MAX_POINTS = 600  # drawn per line: more than that is finer than a pixel
_TOP, _BOTTOM, _RIGHT = 26, 42, 14  # margins, in SVG units (about pixels)
_HORIZONTAL = Markup(
    '<line class="{0}" x1="{1}" x2="{2}" y1="{3}" y2="{3}"/><text class="tick" x="{4}" y="{5}">{6}</text>'
)
_VERTICAL = Markup(
    '<line class="base" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text class="x-tick" x="{0}" y="{3}">{4}</text>'
)
_CHARACTER_WIDTH = 9.2  # of the tick labels on a phone, where the style sheet sets 16 px type


class Stroke(Enum):
    """How a line is drawn; the value is its CSS class."""

    strong = "strong"
    faint = "faint"  # raw values behind a smoothed line
    dots = "dots"  # single points, joined by a thin line


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart. Lines of the same color belong together."""

    name: str
    points: list[Point]
    color: int = 0
    dash: int = 0  # pattern, for lines that may cover each other
    stroke: Stroke = Stroke.strong

    @property
    def style(self) -> str:
        """The CSS classes: stroke, color and dash pattern."""
        return f"{self.stroke.value} c{self.color % NUM_COLORS} dash{self.dash % NUM_DASHES}"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at one x: a vertical line with a label."""

    x: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The content of a chart; `draw` makes the SVG."""

    title: str
    y_label: str
    lines: list[Line]
    x_label: str = "optimizer step"
    unit: Unit = Unit.plain
    from_zero: bool = False
    ceiling: float | None = None  # larger values are drawn at the top edge with an arrow
    band: list[tuple[float, float, float]] = field(default_factory=list)  # x, low, high: the area between them
    marks: list[Mark] = field(default_factory=list)
    note: str = ""

    def draw(self, width: int, height: int) -> Markup:
        """The chart as one <svg> of this size, which the page scales."""
        plot = _Plot.of(self, width, height)
        parts = [*_draw_axes(self, plot), *_draw_band(self.band, plot)]
        for line in self.lines:
            parts.extend(_draw_line(line, plot, self.ceiling))
        parts.extend(_draw_mark(mark, plot) for mark in self.marks)
        return Markup(
            '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">{}'
            '<line class="cursor" y1="{}" y2="{}" x1="0" x2="0"/></svg>'
        ).format(width, height, self.summary, _hover_data(self, plot), Markup("").join(parts), plot.top, plot.bottom)

    @property
    def summary(self) -> str:
        """The chart in a sentence, for screen readers."""
        sentences = []
        for line in self.lines:
            known = [(x, y) for x, y in line.points if y is not None]
            if known:
                (first_x, first), (last_x, last) = known[0], known[-1]
                sentences.append(
                    f"{line.name}: {format_value(first, self.unit)} at {format_value(first_x, Unit.whole)}, "
                    f"{format_value(last, self.unit)} at {format_value(last_x, Unit.whole)}"
                )
        return f"{self.title}, by {self.x_label}. " + "; ".join(sentences)


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


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """The drawing area and its two axes."""

    left: float
    right: float
    top: float
    bottom: float
    x_axis: Axis
    y_axis: Axis

    @staticmethod
    def of(chart: Chart, width: int, height: int) -> _Plot:
        xs = [x for line in chart.lines for x, _ in line.points]
        ys = [y for line in chart.lines for _, y in line.points if y is not None]
        ys += [edge for _, low, high in chart.band for edge in (low, high)]
        if chart.ceiling is not None:
            ys = [min(y, chart.ceiling) for y in ys]
        y_axis = value_axis(ys or [0.0, 1.0], chart.unit, chart.from_zero)
        left = 12 + _CHARACTER_WIDTH * max(map(len, y_axis.labels))
        x_axis = step_axis(xs, num_ticks=max(6, width // 100))
        # The last tick's label is centered at the right edge of the lines and extends beyond it.
        beyond = max(_RIGHT, _CHARACTER_WIDTH * len(x_axis.labels[-1]) / 2)
        return _Plot(left=left, right=width - beyond, top=_TOP, bottom=height - _BOTTOM, x_axis=x_axis, y_axis=y_axis)

    def x(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * self.x_axis.share(value), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - (self.bottom - self.top) * self.y_axis.share(value), 1)


def _draw_axes(chart: Chart, plot: _Plot) -> list[Markup]:
    note = f" ({plot.y_axis.scale_note})" if plot.y_axis.scale_note else ""
    parts = [Markup('<text class="axis-name" x="2" y="12">{}</text>').format(chart.y_label + note)]
    for value, label in zip(plot.y_axis.ticks, plot.y_axis.labels, strict=True):
        kind, y = "base" if value == plot.y_axis.low else "rule", plot.y(value)
        parts.append(_HORIZONTAL.format(kind, plot.left, plot.right, y, plot.left - 8, y + 4, label))
    for value, label in zip(plot.x_axis.ticks, plot.x_axis.labels, strict=True):
        parts.append(_VERTICAL.format(plot.x(value), plot.bottom, plot.bottom + 4, plot.bottom + 18, label))
    parts.append(
        Markup('<text class="axis-name end" x="{}" y="{}">{}</text>').format(
            plot.right, plot.bottom + 36, chart.x_label
        )
    )
    return parts


def _draw_band(points: list[tuple[float, float, float]], plot: _Plot) -> list[Markup]:
    upper = [f"{plot.x(x)},{plot.y(high)}" for x, _, high in points]
    lower = [f"{plot.x(x)},{plot.y(low)}" for x, low, _ in reversed(points)]
    return [Markup('<polygon class="band c0" points="{}"/>').format(" ".join(upper + lower))] if points else []


def _draw_line(line: Line, plot: _Plot, ceiling: float | None) -> list[Markup]:
    points = thin(line.points)
    path, pen = [], "M"
    for x, y in points:
        if y is not None:
            path.append(f"{pen}{plot.x(x)} {plot.y(y)}")
        pen = "M" if y is None else "L"
    parts = [Markup('<path class="{}" d="{}"/>').format(line.style, "".join(path))]
    if line.stroke is Stroke.dots or sum(y is not None for _, y in points) == 1:
        parts.extend(
            Markup('<circle class="{}" cx="{}" cy="{}" r="3.5"/>').format(line.style, plot.x(x), plot.y(y))
            for x, y in points
            if y is not None
        )
    if ceiling is not None:
        arrow = Markup('<path class="arrow {0}" d="M{1} {2}l-4 7h8z"/>')
        parts.extend(
            arrow.format(line.style, plot.x(x), plot.top - 2) for x, y in points if y is not None and y > ceiling
        )
    return parts


def _draw_mark(mark: Mark, plot: _Plot) -> Markup:
    x = plot.x(mark.x)
    on_right = x > (plot.left + plot.right) / 2
    return Markup(
        '<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text class="mark-name{3}" x="{4}" y="{5}">{6}</text>'
    ).format(
        x, plot.top, plot.bottom, " end" if on_right else "", x + (-6 if on_right else 6), plot.top + 12, mark.text
    )


def _hover_data(chart: Chart, plot: _Plot) -> str:
    """The data from which the page's script shows the values under the pointer."""
    lines = [
        {"name": line.name, "points": [_four_digits(point) for point in thin(line.points)]} for line in chart.lines
    ]
    data = {
        "left": plot.left, "right": plot.right, "low": plot.x_axis.low, "high": plot.x_axis.high,
        "x": chart.x_label, "percent": chart.unit is Unit.share, "lines": lines,
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":"))


def _four_digits(point: Point) -> Point:
    x, y = point
    return x, None if y is None else float(f"{y:.4g}")
