"""How the report writes numbers, for people: few digits, units, and the same form everywhere."""

from __future__ import annotations

import math
from enum import Enum

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
NO_VALUE = "\N{EN DASH}"


class Unit(Enum):
    """What a number counts, which decides how it is written; the value is the unit as text."""

    plain = ""
    whole = " "  # counts: steps, documents, tokens
    share = "%"
    gib = "GiB"
    seconds = "s"


def format_value(value: float | None, unit: Unit = Unit.plain) -> str:
    """A single number with its unit: 12.3k, 0.0512, 97.5 %, 3.1 GiB; tiny ones by a power of ten."""
    if value is None:
        return NO_VALUE
    if not math.isfinite(value):
        return "not finite"
    if unit is Unit.share:
        return _sign(f"{100 * value:.1f}") + " %"
    if unit is Unit.seconds:
        return format_duration(value)
    if unit is Unit.whole:
        return format_count(value)
    suffix = " GiB" if unit is Unit.gib else ""
    return _sign(_few_digits(value)) + suffix


def format_count(value: float) -> str:
    """A count: every digit below a million, then millions (M) and billions (B)."""
    return _sign(f"{value:,.0f}") if abs(value) < 999_500 else _scaled(value)


def format_duration(seconds: float) -> str:
    """A time span in its two largest units: 42 s, 1 min 05 s, 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def tick_labels(ticks: list[float], unit: Unit) -> tuple[list[str], str]:
    """Labels of evenly spaced ticks, all in one scale, and what that scale adds to the axis label."""
    largest = max(abs(tick) for tick in ticks)
    scale, suffix, note = 1.0, "", ""
    if unit is Unit.share:
        scale, suffix = 0.01, " %"
    elif largest >= 10_000:
        scale, suffix = _scale_of(largest)
    elif 0 < largest < 1e-3:
        power = math.floor(math.log10(largest))
        scale, note = 10.0**power, f"{TIMES}10{str(power).translate(_SUPERSCRIPTS)}"
    gap = (ticks[1] - ticks[0]) / scale if len(ticks) > 1 else 1.0
    decimals = next((d for d in range(4) if math.isclose(gap * 10**d, round(gap * 10**d), abs_tol=1e-6)), 4)
    return [_label(tick / scale, decimals) + (suffix if tick else suffix.strip("kMB")) for tick in ticks], note


def _label(value: float, decimals: int) -> str:
    return _sign(f"{value:,.{decimals}f}") if value else "0"


def _scale_of(value: float) -> tuple[float, str]:
    # A shade below the power, so that 999,999 is 1M and not 1e+03k.
    return next(((scale, letter) for scale, letter in ((1e9, "B"), (1e6, "M")) if value >= 0.9995 * scale), (1e3, "k"))


def _few_digits(value: float) -> str:
    if value and abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)))
        return f"{value / 10**power:.3g}{TIMES}10{str(power).translate(_SUPERSCRIPTS)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 10_000 else _scaled(value)
    return f"{value:.3g}"


def _scaled(value: float) -> str:
    scale, letter = _scale_of(abs(value))
    return _sign(f"{value / scale:.3g}") + letter


def _sign(text: str) -> str:
    return text.replace("-", MINUS)
