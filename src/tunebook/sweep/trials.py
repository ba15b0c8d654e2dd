"""Which runs a sweep consists of: every combination of the values that its overrides list, as Hydra combines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from tunebook.config.compose import parse_overrides
from tunebook.errors import RequestError, TunebookError

LAUNCHER_KEY = "hydra/launcher"
_LAUNCHER_OPTION = "hydra.launcher."
_MAX_EXAMPLES = 3  # combinations named for one problem; the others are counted


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    number: int  # from 0, in Hydra's order: the last listed key changes fastest
    overrides: tuple[str, ...]  # one value each, as `tunebook train` takes them
    swept: dict[str, str]  # the values of the keys that differ between the trials

    @property
    def name(self) -> str:
        """Of its folder inside the sweep's."""
        return f"trial-{self.number:03d}"

    @property
    def title(self) -> str:
        """What sets it apart."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items())


def split_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """Tell the run's overrides from those that choose Hydra's launcher."""
    launcher = [word for word in words if word.startswith((f"{LAUNCHER_KEY}=", _LAUNCHER_OPTION))]
    return [word for word in words if word not in launcher], launcher


def expand_trials(overrides: list[str]) -> list[Trial]:
    """Every combination. Raises: RequestError for what is no override, and when none lists several values."""
    parsed = [_parse(word) for word in overrides]
    swept_keys = [override.key_or_group for override in parsed if override.is_sweep_override()]
    if not swept_keys:
        raise RequestError(
            "no override lists several values, so there is nothing to sweep over; list some with commas, such as "
            "optimizer.learning_rate=1e-4,3e-4 training.seed=0,1 (for one run: tunebook train)",
            problem_id="sweep-without-values",
        )
    try:
        combinations = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    except (HydraException, TypeError) as error:
        raise RequestError(
            "the values of this sweep cannot be listed beforehand, as with glob(...) and interval(...); write them out "
            "with commas, or as range(1,4) or choice(a,b)",
            problem_id="sweep-form",
        ) from error
    return [_trial(number, words, swept_keys) for number, words in enumerate(combinations)]


def check_trials(trials: list[Trial], check: Callable[[list[str]], None]) -> None:
    """Check every trial before any runs. Raises: RequestError with each distinct problem and whose it is."""
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
    """The same text for the same problem of trials that differ in the value they were given."""
    for key, value in trial.swept.items():
        message = message.replace(f"{key}={value}", key)
    return message


def _parse(word: str) -> Override:
    """One override; those without several values are checked as everywhere else."""
    if word.startswith(("+", "~")) or not word.startswith("hydra"):
        try:
            override: Override = OverridesParser.create().parse_override(word)
        except HydraException:
            parse_overrides([word])
            raise
        if word.startswith(("+", "~")) or not override.is_sweep_override():
            parse_overrides([word])
        return override
    raise RequestError(
        f"override '{word}': of Hydra's own keys a sweep takes {LAUNCHER_KEY}=NAME and {_LAUNCHER_OPTION}KEY=VALUE "
        "only; the values to try are listed with commas",
        problem_id="override-form",
    )


def _trial(number: int, words: list[str], swept_keys: list[str]) -> Trial:
    values = dict(word.split("=", 1) for word in words)
    return Trial(number=number, overrides=tuple(words), swept={key: values[key] for key in swept_keys})


def _which(trials: list[Trial], num_all: int) -> str:
    if len(trials) == num_all:
        return f"all {num_all} trials" if num_all > 1 else "its only trial"
    named = "; ".join(trial.title for trial in trials[:_MAX_EXAMPLES])
    more = f" and {len(trials) - _MAX_EXAMPLES} more" if len(trials) > _MAX_EXAMPLES else ""
    return f"{len(trials)} of {num_all} trials ({named}{more})"
