from __future__ import annotations

import pytest

from tunebook.record.page.numbers import Unit, format_duration, format_value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0512, Unit.plain, "0.0512"),
        (12.345, Unit.plain, "12.3"),
        (6913.2, Unit.plain, "6,913"),
        (12_345, Unit.plain, "12.3k"),
        (819_120, Unit.whole, "819,120"),
        (999_600, Unit.whole, "1M"),
        (3_085_938_688, Unit.whole, "3.09B"),
        (2e-5, Unit.plain, "2\N{MULTIPLICATION SIGN}10⁻⁵"),
        (0.0, Unit.plain, "0"),
        (-0.5, Unit.plain, "\N{MINUS SIGN}0.5"),
        (0.97333, Unit.share, "97.3 %"),
        (1.99, Unit.gib, "1.99 GiB"),
        (None, Unit.gib, "\N{EN DASH}"),
        (float("nan"), Unit.plain, "not finite"),
    ],
)
def test_numbers_are_short_and_carry_their_unit(value: float | None, unit: Unit, text: str) -> None:
    assert format_value(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.27, "4.3 s"), (42, "42 s"), (102, "1 min 42 s"), (65, "1 min 05 s"), (11_520, "3 h 12 min"), (59.96, "60 s")],
)
def test_durations_use_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
