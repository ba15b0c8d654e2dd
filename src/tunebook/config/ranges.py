"""The range of a number in the schema: metadata of its field, checked by `plan.rules.settings`."""

from __future__ import annotations

import operator
from dataclasses import Field, field
from typing import Any

_SIGNS = {"at least": ">=", "above": ">", "at most": "<=", "below": "<"}
_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
_HIGHEST = 10**15  # of numbers without another limit: every size is smaller, and its products are finite


def number(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float = _HIGHEST,
    below: float | None = None,
    unit: str = "",
    metadata: dict[str, bool] | None = None,
) -> Any:
    """A field for a number, or for a mapping of numbers (`default=dict`), with its limits and its unit."""
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    known = {"limits": limits, "unit": unit, **(metadata or {})}
    return field(default_factory=dict, metadata=known) if default is dict else field(default=default, metadata=known)


def demand(setting: Field[Any], value: Any) -> str | None:
    """What a number must be instead, such as `at least 1`; None if it is in the field's range. NaN is in none."""
    if not isinstance(value, int | float):
        return "a number"
    for words, limit in setting.metadata.get("limits", {}).items():
        if limit is not None and not _HOLDS[words](value, limit):
            return f"{words} {limit:,}"
    return None


def limits_text(setting: Field[Any]) -> str:
    """The limits of a number, such as `>= 1, < 2`; empty if there are none."""
    limits = setting.metadata.get("limits", {})
    return ", ".join(f"{_SIGNS[words]} {limit:,}" for words, limit in limits.items() if limit not in (None, _HIGHEST))
