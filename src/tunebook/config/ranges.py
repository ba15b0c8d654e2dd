"""The range of a number in the schema: part of its field's metadata, checked by `plan.rules.numbers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Any

_RANGE = "range"  # key of the metadata
_HIGHEST = 10**15  # of numbers without another limit: every size is smaller, and its products are finite


@dataclass(frozen=True, kw_only=True)
class Range:
    """What a number may be. NaN is in no range."""

    low: float
    high: float
    is_low_excluded: bool
    is_high_excluded: bool
    usual: str  # a value to type instead of one outside

    def demand(self, value: float) -> str | None:
        """What the value must be instead; None if it is in the range."""
        if not (value > self.low if self.is_low_excluded else value >= self.low):
            return f"{'above' if self.is_low_excluded else 'at least'} {self.low:,}"
        if not (value < self.high if self.is_high_excluded else value <= self.high):
            return f"{'below' if self.is_high_excluded else 'at most'} {self.high:,}"
        return None


def number(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    usual: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """A field for a number, or for a mapping of numbers (`default=dict`), that lies between two limits.

    `usual` is what an error suggests; None suggests the default.
    """
    low = above if at_least is None else at_least
    high = below if at_most is None else at_most
    assert low is not None
    limits = Range(
        low=low,
        high=_HIGHEST if high is None else high,
        is_low_excluded=at_least is None,
        is_high_excluded=below is not None,
        usual=usual or ("null" if default is None else f"{default}"),
    )
    known = {_RANGE: limits} | dict(metadata or {})
    return field(default_factory=dict, metadata=known) if default is dict else field(default=default, metadata=known)


def range_of(setting: Field[Any]) -> Range | None:
    """The range of a dataclass's field; None if it is no number."""
    return setting.metadata.get(_RANGE)
