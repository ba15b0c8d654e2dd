"""What a sweep tries, in the syntax of Hydra's multirun.

key=a,b  key=choice(a,b)            one of these
key=range(8,65,8)                   a number in steps; the end is excluded, as everywhere in Hydra
key=interval(1e-6,1e-4)             in a search, a number; also int(interval(1,8)) and tag(log,interval(1e-6,1e-4))
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tunebook.config.compose import parse_overrides
from tunebook.errors import RequestError

Values = dict[str, Any]  # of one trial, by key


@dataclass(frozen=True, kw_only=True)
class Space:
    """The overrides that all trials share, and what the other keys are chosen from."""

    fixed: list[str]
    choices: dict[str, BaseDistribution]

    def overrides(self, values: Values) -> list[str]:
        """Return the overrides of one trial. A number is written so that it parses to the same value."""
        return [*self.fixed, *(f"{key}={text}" for key, text in as_text(values).items())]

    def grid(self) -> list[Values]:
        """Return every combination, the last key changing fastest, as in Hydra; for a space without intervals."""
        listed = [_ends(distribution) for distribution in self.choices.values()]
        return [dict(zip(self.choices, values, strict=True)) for values in itertools.product(*listed)]

    def corners(self) -> list[Values]:
        """Return trials with the ends of every range and with each choice, to be checked before a search starts."""
        ends = {key: _ends(distribution) for key, distribution in self.choices.items()}
        most = max(len(values) for values in ends.values())
        return [{key: values[min(index, len(values) - 1)] for key, values in ends.items()} for index in range(most)]


def read_space(overrides: list[str], *, is_search: bool) -> Space:
    """Read the overrides of a sweep. Raises: RequestError for an invalid one, or if none lists several values."""
    fixed: list[str] = []
    choices: dict[str, BaseDistribution] = {}
    for text in overrides:
        parsed = _parse(text)
        if parsed.is_sweep_override():
            choices[parsed.get_key_element()] = _distribution(parsed, text, is_search=is_search)
        else:
            fixed.append(text)
            choices.pop(parsed.get_key_element(), None)  # the last one counts, as in a run
    if not choices:
        raise RequestError(
            "no override lists several values, so there is nothing to sweep over; list some with commas, such as "
            "optimizer.learning_rate=1e-4,3e-4 training.seed=0,1, or search a range: "
            "'optimizer.learning_rate=tag(log,interval(1e-6,1e-4))' --num-trials=20 (for one run: tunebook train)",
            problem_id="sweep-without-values",
        )
    return Space(fixed=fixed, choices=choices)


def as_text(values: Values) -> dict[str, str]:
    """Return values as they are typed."""
    return {key: value if isinstance(value, str) else repr(value) for key, value in values.items()}


def title_of(values: Values) -> str:
    """Return values as one line."""
    return " ".join(f"{key}={text}" for key, text in as_text(values).items())


def _parse(word: str) -> Override:
    try:
        override: Override = OverridesParser.create().parse_override(word)
    except HydraException:
        return parse_overrides([word])[0]  # a text that Hydra's grammar lacks, or an error with what to type
    return override


def _ends(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return [distribution.low, distribution.high]


def _distribution(override: Override, word: str, *, is_search: bool) -> BaseDistribution:
    sweep: Any = override.value()
    tags: set[str] = getattr(sweep, "tags", set())
    try:
        if tags and not (isinstance(sweep, IntervalSweep) and tags == {"log"}):
            raise ValueError("the only tag is that of tag(log,interval(low,high))")
        if isinstance(sweep, IntervalSweep) and is_search:
            return _numbers(sweep.start, sweep.end, None, is_log="log" in tags)
        if isinstance(sweep, RangeSweep) and is_search:
            values = [*sweep.range()]
            if not values:
                raise ValueError("the range is empty")
            return _numbers(values[0], values[-1], sweep.step)
        if isinstance(sweep, ChoiceSweep | RangeSweep):
            return CategoricalDistribution([*override.sweep_string_iterator()])
    except ValueError as error:  # from Optuna, which says what is wrong with the range
        raise RequestError(f"override '{word}': {error}", problem_id="sweep-range") from error
    fix = "add --num-trials=20 to search it" if isinstance(sweep, IntervalSweep) else "write them out with commas"
    raise RequestError(
        f"override '{word}': its values cannot be listed; {fix}, or write range(1,4) or choice(a,b)",
        problem_id="sweep-range",
    )


def _numbers(low: Any, high: Any, step: Any, *, is_log: bool = False) -> BaseDistribution:
    if all(isinstance(number, int) for number in (low, high, step or 1)):
        return IntDistribution(low, high, log=is_log, step=step or 1)
    return FloatDistribution(float(low), float(high), log=is_log, step=step)
