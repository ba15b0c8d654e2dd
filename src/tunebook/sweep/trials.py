"""The trials of a sweep: every combination of the values that its overrides list, as Hydra combines them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException

from tunebook.config.choices import RESUME_WORDS
from tunebook.config.compose import parse_overrides
from tunebook.errors import RequestError, TunebookError, first_few

_LOOKS_LIKE_A_RANGE = re.compile(r"=.*\b(interval|range|choice|tag|log|int)\(")
MAX_TRIALS = 2000  # of a list: each is checked before any runs, in 0.2 s of one core
_MAX_EXAMPLES = 3  # combinations named per problem; the others are counted


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    number: int  # from 0, in Hydra's order: the last listed key changes fastest
    overrides: tuple[str, ...]  # one value each, as `tunebook train` takes them
    swept: dict[str, str]  # values of the keys that differ between trials

    @property
    def name(self) -> str:
        """The name of its folder in the sweep's folder."""
        return f"trial-{self.number:03d}"

    @property
    def title(self) -> str:
        """The values that distinguish it."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items())


def expand_trials(overrides: list[str]) -> list[Trial]:
    """Return every combination. Raises: RequestError for an invalid override, or if none lists several values."""
    parsed = parse_sweep_overrides(overrides)
    swept_keys = [override.key_or_group for override in parsed if override.is_sweep_override()]
    if not swept_keys:
        raise RequestError(
            "no override lists several values, so there is nothing to sweep over; list some with commas, such as "
            "optimizer.learning_rate=1e-4,3e-4 training.seed=0,1 (for one run: tunebook train)",
            problem_id="sweep-without-values",
        )
    _refuse_too_many(parsed)
    try:
        combinations = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    except (HydraException, TypeError) as error:
        raise RequestError(
            "the values of this sweep cannot be listed beforehand, as with glob(...) and interval(...); write them out "
            "with commas, or as range(1,4) or choice(a,b), or let a search choose from an interval: add "
            "--search=optuna --num-trials=20",
            problem_id="sweep-form",
        ) from error
    _refuse_repeats(combinations)
    return [_trial(number, words, swept_keys) for number, words in enumerate(combinations)]


def num_values(sweep: RangeSweep) -> int:
    """Count the numbers of a range, with Hydra's arithmetic, without generating them."""
    assert sweep.start is not None and sweep.stop is not None
    numbers = (sweep.start, sweep.stop, sweep.step)
    if all(isinstance(number, int) for number in numbers):
        return len(range(*map(int, numbers)))
    start, stop, step = map(Decimal, numbers)
    return max(0, math.ceil((stop - start) / step))


def _refuse_too_many(parsed: list[Override]) -> None:
    """Refuse more trials than can be listed, before listing them. Raises: RequestError with what to type."""
    counts = {override.key_or_group: _num_listed(override) for override in parsed if override.is_sweep_override()}
    total = math.prod(counts.values())
    if total <= MAX_TRIALS:
        return
    parts = " x ".join(f"{count:,} of {key}" for key, count in counts.items() if count > 1)
    raise _bad_form(
        f"this sweep would have {total:,} trials ({parts}), and at most {MAX_TRIALS:,} are listed; name fewer values, "
        "with larger steps, or let a search choose among them: add --search=optuna --num-trials=20"
    )


def _num_listed(override: Override) -> int:
    value = override.value()
    if isinstance(value, RangeSweep):
        return num_values(value)
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def check_trials(trials: list[Trial], check: Callable[[list[str]], None]) -> None:
    """Check every trial before any runs. Raises: RequestError with each distinct problem and its trials."""
    found: dict[str, list[tuple[Trial, TunebookError]]] = {}
    for trial in trials:
        try:
            check(list(trial.overrides))
        except TunebookError as error:
            found.setdefault(_without_values(error.message, trial), []).append((trial, error))
    if not found:
        return
    parts = [
        f"{_which([trial for trial, _ in problems], len(trials))}: {problems[0][1].message}"
        for problems in found.values()
    ]
    first = next(iter(found.values()))[0][1]
    raise RequestError(
        "\n".join(["this sweep cannot run, and none of its trials was started", *parts]), problem_id=first.problem_id
    )


def _without_values(message: str, trial: Trial) -> str:
    """Remove a trial's own values from a message, so that the same problem of several trials has the same text."""
    for key, value in trial.swept.items():
        message = message.replace(f"{key}={value}", key)
    return message


def without_resume_override(words: list[str]) -> list[str]:
    """Drop `training.resume=auto` and `never`, which say whether to resume an earlier sweep.

    A folder stays: the trials start from it.
    """
    parts = [(word, *word.partition("=")[::2]) for word in words]
    return [word for word, key, value in parts if key != "training.resume" or value.strip("'\"") not in RESUME_WORDS]


def parse_sweep_overrides(words: list[str]) -> list[Override]:
    """Parse a sweep's overrides. Raises: RequestError for those that Hydra would misread or silently ignore."""
    parsed = [_parse(word) for word in words]
    keys = [override.key_or_group for override in parsed]
    for override in parsed:
        key = override.key_or_group
        if override.is_sweep_override() and keys.count(key) > 1:
            raise _bad_form(
                f"{key} is given {keys.count(key)} times, once with several values; Hydra would let the last one win "
                f"and run trials that differ in name only; type it once, with all values: {key}=1,2,3"
            )
        if override.is_sweep_override() and getattr(override.value(), "shuffle", False):
            raise _bad_form(
                f"override '{override.input_line}': shuffle(...) would order the trials differently each time, and an "
                "interrupted sweep could not be resumed; write the values in the order in which to try them"
            )
        _check_range(override)
    return parsed


def _check_range(override: Override) -> None:
    """Refuse a range that never reaches its end. Raises: RequestError with what to type."""
    sweep = override.value()
    if not isinstance(sweep, RangeSweep):
        return
    if sweep.step != 0 and all(map(math.isfinite, (sweep.start or 0, sweep.stop or 0, sweep.step))):
        return
    why = "a range has two ends" if sweep.step else "a range in steps of 0 never reaches its end"
    raise RequestError(
        f"override '{override.input_line}': {why}; write numbers, the third of them the step, as in "
        f"{override.key_or_group}=range(0,10,2)",
        problem_id="sweep-range",
    )


def _parse(word: str) -> Override:
    """Parse one override; those with a single value get the usual checks."""
    if word.startswith("hydra"):
        raise _bad_form(
            f"override '{word}': Hydra's own keys are not set in a sweep; its launcher is chosen by --launcher=basic, "
            "--launcher=joblib --jobs=2 or --launcher=slurm, a search by --search=optuna, and the values to try are "
            "listed with commas"
        )
    try:
        override: Override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        if _LOOKS_LIKE_A_RANGE.search(word):
            said = " ".join(str(error).split()).partition(" See ")[0]
            raise RequestError(
                f"override '{word}' is no range ({said}); write numbers, as in key=interval(1e-6,1e-4), "
                "key=int(interval(1,8)), key=tag(log,interval(1e-6,1e-4)), key=range(1,4) or key=choice(a,b)",
                problem_id="sweep-range",
            ) from error
        parse_overrides([word])
        raise
    if word.startswith(("+", "~")) or not override.is_sweep_override():
        parse_overrides([word])
    return override


def _refuse_repeats(combinations: list[list[str]]) -> None:
    seen: set[tuple[str, ...]] = set()
    for words in map(tuple, combinations):
        if words in seen:
            raise _bad_form(f"two trials would be the same ({' '.join(words)}); name each value of a key once")
        seen.add(words)


def _bad_form(message: str) -> RequestError:
    return RequestError(message, problem_id="sweep-form")


def _trial(number: int, words: list[str], swept_keys: list[str]) -> Trial:
    values = dict(word.split("=", 1) for word in words)
    return Trial(number=number, overrides=tuple(words), swept={key: values[key] for key in swept_keys})


def _which(trials: list[Trial], num_all: int) -> str:
    if len(trials) == num_all:
        return f"all {num_all} trials" if num_all > 1 else "its only trial"
    named = first_few([trial.title for trial in trials], _MAX_EXAMPLES, "; ")
    return f"{len(trials)} of {num_all} trials ({named})"
