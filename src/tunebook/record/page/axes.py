"""Axes of the report's charts: where they begin and end, and which round numbers they are marked with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tunebook.record.page.numbers import Unit, tick_labels

_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_START_AT_ZERO_BELOW = 0.5  # of the largest value: a smallest value under this is near enough to zero to show it


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: its two ends in data units, its ticks inside them, and the scale note of their labels."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]
    scale_note: str

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end; values outside lie on the end."""
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
    """The horizontal axis of steps or tokens: from zero, unless all lies far off, to exactly the last value."""
    low, high = min(values), max(values)
    low = 0.0 if low == high or low < _START_AT_ZERO_BELOW * high else low
    if high <= low:
        high = low + 1
    return _axis(low, high, round_ticks(low, high, num_ticks, whole=True), Unit.whole)


def value_axis(values: list[float], unit: Unit, from_zero: bool, num_ticks: int = 5) -> Axis:
    """The vertical axis: round numbers around the values; starts at zero where asked, or where they come near it."""
    low, high = min(values), max(values)
    if low >= 0 and (from_zero or low < _START_AT_ZERO_BELOW * high):
        low = 0.0
    if high <= low:  # one value, or all the same: give it air on both sides
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if low == 0 else low - margin), high + margin
    ticks = round_ticks(low, high, num_ticks)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    # Out to the next tick on both sides, so that no line touches the frame without a number beside it.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return _axis(ticks[0], ticks[-1], ticks, unit)


def _axis(low: float, high: float, ticks: list[float], unit: Unit) -> Axis:
    labels, note = tick_labels(ticks, unit)
    return Axis(low=low, high=high, ticks=ticks, labels=labels, scale_note=note)
