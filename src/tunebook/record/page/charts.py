"""Line charts as inline SVG.

No plotting library: the report is one file that must open without network and without JavaScript. A library would add
80 MB to every image and megabytes of script, or a bitmap that neither scales nor follows the reader's color scheme.
Colors are classes (`c0`..`c5`) of the page's style sheet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from tunebook.record.page.numbers import Unit, format_value, tick_labels

Point = tuple[float, float | None]  # x, y; None breaks the line
Stroke = Literal["strong", "faint", "dots"]  # CSS class; faint: behind a smoothed line; dots: points on a thin line

NUM_COLORS = 6
NUM_DASHES = 3
MAX_POINTS = 600  # drawn per line: more than that is finer than a pixel
SMOOTH_FROM = 30  # points; fewer are readable without smoothing
_TOP, _BOTTOM, _RIGHT = 26, 42, 14  # margins, in SVG units (about pixels)
_CHARACTER_WIDTH = 9.2  # of the tick labels on a phone, where the style sheet sets 16 px type
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_START_AT_ZERO_BELOW = 0.5  # of the largest value: an axis whose smallest value is below this starts at zero
_OUTLIER_FACTOR = 3.0  # a value this many times the 98th percentile would flatten all others


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart. Lines of the same color belong together."""

    name: str
    points: list[Point]
    color: int = 0
    dash: int = 0  # pattern, for lines that may cover each other
    stroke: Stroke = "strong"

    @property
    def style(self) -> str:
        """The CSS classes: stroke, color and dash pattern."""
        return f"{self.stroke} c{self.color % NUM_COLORS} dash{self.dash % NUM_DASHES}"


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
    mark: tuple[float, str] | None = None  # a vertical line at x, with a label
    note: str = ""

    def draw(self, width: int, height: int) -> Markup:
        """The chart as one <svg> of this size, which the page scales."""
        x_axis, y_axis = self._axes(width, height)
        parts = [*_draw_axes(self, x_axis, y_axis)]
        if self.band:
            upper = [f"{x_axis.at(x)},{y_axis.at(high)}" for x, _, high in self.band]
            lower = [f"{x_axis.at(x)},{y_axis.at(low)}" for x, low, _ in reversed(self.band)]
            parts.append(Markup('<polygon class="band c0" points="{}"/>').format(" ".join(upper + lower)))
        for line in self.lines:
            parts += _draw_line(line, x_axis, y_axis, self.ceiling)
        if self.mark:
            x, is_right = x_axis.at(self.mark[0]), x_axis.at(self.mark[0]) > (x_axis.begin + x_axis.end) / 2
            parts.append(
                Markup(
                    '<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>'
                    '<text class="mark-name{3}" x="{4}" y="{5}">{6}</text>'
                ).format(
                    x, _TOP, y_axis.begin, " end" if is_right else "", x + (-6 if is_right else 6), _TOP + 12,
                    self.mark[1],
                )
            )  # fmt: skip
        hover = {  # from which the page's script shows the values under the pointer
            "left": x_axis.begin, "right": x_axis.end, "low": x_axis.low, "high": x_axis.high, "x": self.x_label,
            "percent": self.unit is Unit.share,
            "lines": [
                {"name": line.name,
                 "points": [(x, None if y is None else float(f"{y:.4g}")) for x, y in thin(line.points)]}
                for line in self.lines
            ],
        }  # fmt: skip
        return Markup(
            '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">{}'
            '<line class="cursor" y1="{}" y2="{}" x1="0" x2="0"/></svg>'
        ).format(
            width, height, self.summary, json.dumps(hover, separators=(",", ":")), Markup("").join(parts), _TOP,
            y_axis.begin,
        )  # fmt: skip

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
        return f"{self.title}, by {self.x_label}. " + "; ".join(sentences)

    def _axes(self, width: int, height: int) -> tuple[_Axis, _Axis]:
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points if y is not None]
        ys += [edge for _, low, high in self.band for edge in (low, high)]
        if self.ceiling is not None:
            ys = [min(y, self.ceiling) for y in ys]
        y_ticks = value_ticks(ys or [0.0, 1.0], from_zero=self.from_zero)
        y_axis = _Axis(y_ticks, y_ticks[0], y_ticks[-1], *tick_labels(y_ticks, self.unit), height - _BOTTOM, _TOP)
        low, high, x_ticks = step_ticks(xs, max(6, width // 100))
        labels, _ = tick_labels(x_ticks, Unit.whole)
        # The last tick's label is centered at the right edge of the lines and extends beyond it.
        right = width - max(_RIGHT, _CHARACTER_WIDTH * len(labels[-1]) / 2)
        return _Axis(
            x_ticks, low, high, labels, "", 12 + _CHARACTER_WIDTH * max(map(len, y_axis.labels)), right
        ), y_axis


@dataclass(frozen=True)
class _Axis:
    ticks: list[float]
    low: float  # the ends in data units
    high: float
    labels: list[str]
    scale_note: str
    begin: float  # the ends in SVG units
    end: float

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
    """The ends and ticks of an axis of steps or tokens: to the last value; from zero unless all values are far away."""
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


def _draw_axes(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> list[Markup]:
    left, right, bottom = x_axis.begin, x_axis.end, y_axis.begin
    rule = Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="{}" x="{}" y="{}">{}</text>')
    name = Markup('<text class="axis-name{}" x="{}" y="{}">{}</text>')
    note = f" ({y_axis.scale_note})" if y_axis.scale_note else ""
    parts = [name.format("", 2, 12, chart.y_label + note)]
    for value, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        kind, y = "base" if value == y_axis.low else "rule", y_axis.at(value)
        parts.append(rule.format(kind, left, right, y, y, "tick", left - 8, y + 4, label))
    for value, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis.at(value)
        parts.append(rule.format("base", x, x, bottom, bottom + 4, "x-tick", x, bottom + 18, label))
    return [*parts, name.format(" end", right, bottom + 36, chart.x_label)]


def _draw_line(line: Line, x_axis: _Axis, y_axis: _Axis, ceiling: float | None) -> list[Markup]:
    path, pen, known = [], "M", []
    for x, y in thin(line.points):
        if y is not None:
            known.append((x_axis.at(x), y_axis.at(y), y))
            path.append(f"{pen}{known[-1][0]} {known[-1][1]}")
        pen = "M" if y is None else "L"
    parts = [Markup('<path class="{}" d="{}"/>').format(line.style, "".join(path))]
    if line.stroke == "dots" or len(known) == 1:
        dot = Markup('<circle class="{}" cx="{}" cy="{}" r="3.5"/>')
        parts += [dot.format(line.style, x, y) for x, y, _ in known]
    arrow = Markup('<path class="arrow {}" d="M{} {}l-4 7h8z"/>')
    return parts + [arrow.format(line.style, x, _TOP - 2) for x, _, y in known if ceiling is not None and y > ceiling]
