from __future__ import annotations

import pytest

from tunebook.record.page.charts import round_ticks, step_axis, value_axis
from tunebook.record.page.numbers import Unit


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 8, [0, 2, 4, 6, 8]), (0, 0.1, [0, 0.025, 0.05, 0.075, 0.1]), (3, 7, [3, 4, 5, 6, 7]), (0, 0.0, [])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    if low == high:
        with pytest.raises(ValueError, match="math domain"):  # callers widen an empty range first
            round_ticks(low, high, 5)
    else:
        assert round_ticks(low, high, 5) == pytest.approx(ticks)


def test_steps_are_whole_and_end_at_the_last() -> None:
    axis = step_axis([1, 2, 3])
    assert (axis.low, axis.high, axis.ticks) == (0, 3, [0, 1, 2, 3])
    assert step_axis([1, 240]).ticks == [0, 50, 100, 150, 200]
    assert step_axis([900, 1000]).low == 900  # a resumed run's axis does not waste nine tenths
    assert (step_axis([5]).low, step_axis([5]).high) == (0, 5)


def test_values_start_at_zero_where_they_come_near_it_or_it_is_asked() -> None:
    assert value_axis([0.1, 7.0], Unit.plain, from_zero=False).low == 0
    squeezed = value_axis([2.31, 2.89], Unit.plain, from_zero=False)
    assert 2.0 < squeezed.low <= 2.31 < 2.89 <= squeezed.high < 3.1
    assert value_axis([11_900, 12_300], Unit.plain, from_zero=True).low == 0
    assert value_axis([-3, 5], Unit.plain, from_zero=True).low < -2.9


@pytest.mark.parametrize("values", [[0.0, 0.0], [5.0], [2.5, 2.5, 2.5], [1e-30, 1e-30]])
def test_equal_values_still_have_an_axis_around_them(values: list[float]) -> None:
    axis = value_axis(values, Unit.plain, from_zero=False)
    assert axis.low <= values[0] <= axis.high
    assert axis.high > axis.low
    assert len(axis.ticks) >= 2


def test_shares_lie_between_the_ends() -> None:
    axis = value_axis([0, 8], Unit.plain, from_zero=True)
    assert [axis.share(value) for value in (-1, 0, 2, 8, 99)] == [0, 0, 0.25, 1, 1]
