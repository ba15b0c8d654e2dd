"""Search spaces, in the syntax of Hydra's own Optuna sweeper.

key=interval(1e-6,1e-4)             a number; integers only: int(interval(1,8)); logarithmic: tag(log,interval(...))
key=range(8,65,8)                   a number in steps; the end is excluded, as everywhere in Hydra
key=a,b  key=choice(a,b)            one of these
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from tunebook.config.override_text import shell_word
from tunebook.errors import RequestError
from tunebook.sweep.trials import Trial, num_values, parse_sweep_overrides

Space = dict[str, BaseDistribution]


def read_space(words: list[str]) -> tuple[list[str], Space]:
    """Return the overrides that all trials share, and the search space of the other keys.

    Raises: RequestError for an invalid range, or if there is nothing to choose from.
    """
    fixed: list[str] = []
    space: Space = {}
    for word, override in zip(words, parse_sweep_overrides(words), strict=True):
        if override.is_sweep_override():
            space[override.key_or_group] = _distribution(override, word)
        else:
            fixed.append(word)
    if not space:
        raise RequestError(
            "no override gives the search anything to choose from; write a range, such as "
            "'optimizer.learning_rate=tag(log,interval(1e-6,1e-4))' or 'training.global_samples=range(8,65,8)', or "
            "choices, such as schedule=cosine,linear",
            problem_id="sweep-without-values",
        )
    return fixed, space


def trial_of(number: int, fixed: list[str], params: dict[str, Any]) -> Trial:
    """Return the trial with these values. A number is written so that it parses to the same value."""
    values = {key: value if isinstance(value, str) else repr(value) for key, value in params.items()}
    return Trial(number=number, overrides=(*fixed, *(f"{key}={value}" for key, value in values.items())), swept=values)


def corners(fixed: list[str], space: Space) -> list[Trial]:
    """Return trials at the ends of every range and at each choice, to be checked before any value is proposed."""
    ends = {key: _ends(distribution) for key, distribution in space.items()}
    most = max(len(values) for values in ends.values())
    return [
        trial_of(number, fixed, {key: values[min(number, len(values) - 1)] for key, values in ends.items()})
        for number in range(most)
    ]


def describe(space: Space) -> dict[str, Any]:
    """Return the space as JSON."""
    return {key: distribution_to_json(distribution) for key, distribution in space.items()}


def chosen_from(distribution: BaseDistribution) -> str:
    """Describe what a search chooses from, as text."""
    if isinstance(distribution, CategoricalDistribution):
        return ", ".join(map(str, distribution.choices))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    kind = "whole numbers, " if isinstance(distribution, IntDistribution) else ""
    step = f", in steps of {distribution.step}" if distribution.step not in (None, 1) else ""
    return f"{kind}{distribution.low} to {distribution.high}{step}{', by magnitude' if distribution.log else ''}"


def _ends(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return [distribution.low, distribution.high]


def _distribution(override: Override, word: str) -> BaseDistribution:
    sweep: Any = override.value()
    tags: set[str] = getattr(sweep, "tags", set())  # a glob has none
    if unknown := tags - {"log"}:
        raise _bad_range(word, f"the tag '{sorted(unknown)[0]}' means nothing here", "tag(log,interval(low,high))")
    if isinstance(sweep, IntervalSweep):
        return _interval(sweep, word)
    if tags:
        raise _bad_range(word, "only an interval can be searched in magnitudes", "tag(log,interval(low,high))")
    if isinstance(sweep, RangeSweep):
        return _steps(sweep, word)
    if isinstance(sweep, ChoiceSweep) and not any(isinstance(part, IntervalSweep | RangeSweep) for part in sweep.list):
        values = list(override.sweep_string_iterator())
        if len(set(values)) == len(values):
            return CategoricalDistribution(values)
        raise _bad_range(word, "a value is named twice", "each value once")
    raise _bad_range(
        word, "a search cannot choose from this", "one interval(low,high), one range(start,stop,step), or a,b,c"
    )


def _interval(sweep: IntervalSweep, word: str) -> BaseDistribution:
    low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
    assert low is not None and high is not None
    if low >= high:
        why = f"the low end {low} is not below the high end {high}"
        raise _bad_range(word, why, _corrected_interval(sweep, word))
    if is_log and low <= 0:
        raise _bad_range(word, f"there is no magnitude of {low}", "a low end above 0, or leave tag(log,...) out")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=is_log)
    return FloatDistribution(float(low), float(high), log=is_log)


def _corrected_interval(sweep: IntervalSweep, word: str) -> str:
    """Return the override that was probably meant: with the lower end first, or with the only value."""
    key = word.partition("=")[0]
    low, high = (repr(end).removesuffix(".0") for end in (sweep.end, sweep.start))
    if low == high:
        return f"{key}={low}"
    value = f"interval({low},{high})"
    if isinstance(sweep.start, int):
        value = f"int({value})"
    if "log" in sweep.tags:
        value = f"tag(log,{value})"
    return shell_word(f"{key}={value}")


def _steps(sweep: RangeSweep, word: str) -> BaseDistribution:
    num = num_values(sweep)
    if num < 2 or sweep.step <= 0:
        raise _bad_range(word, f"this range has {num} values going up", "range(start,stop,step)")
    low, step = Decimal(str(sweep.start)), Decimal(str(sweep.step))  # Decimal: sums of floats would miss the end
    last = low + (num - 1) * step
    if all(isinstance(number, int) for number in (sweep.start, sweep.stop, sweep.step)):
        return IntDistribution(int(low), int(last), step=int(step))
    return FloatDistribution(float(low), float(last), step=float(step))


def _bad_range(word: str, why: str, instead: str) -> RequestError:
    return RequestError(f"override '{word}': {why}; type {instead}", problem_id="sweep-range")
