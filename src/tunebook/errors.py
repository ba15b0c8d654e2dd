"""The exceptions Tunebook raises on purpose, and the exit code each one ends the process with.

TunebookError (1)
├── RequestError (2)       the request is wrong: a key, a type, a name, a rule
├── DoesNotFitError (3)    the plan does not fit the hardware
├── DataError (4)          the data is wrong: a broken line, a missing field, nothing to train on
├── DifferenceError (5)    `verify` or `reproduce` found a difference
├── StoppedError (6)       stopped on request after a clean save: requeue
└── InvalidTrainingError (7)  the training is invalid: a loss that is not finite, a leak

The command line prints these without a traceback; anything else is unexpected, keeps its traceback and exits 1.
Every message contains what was wrong (with the value), why it cannot work, and what to type instead. A rule's
`problem_id` is its id, which `tunebook explain` takes; others are for scripts and tests.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


class TunebookError(Exception):
    """Base of everything Tunebook raises on purpose. `exit_code` replaces that of the class, as of another process."""

    exit_code: int = 1

    def __init__(self, message: str, *, problem_id: str | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.problem_id = problem_id
        if exit_code is not None:
            self.exit_code = exit_code


class RequestError(TunebookError):
    """The request cannot be fulfilled: an unknown key or name, a wrong type, or a broken rule."""

    exit_code = 2


class DoesNotFitError(TunebookError):
    """The plan needs more memory or disk than the hardware has."""

    exit_code = 3


class DataError(TunebookError):
    """The data set, tokenizer or template cannot be trained on as it is."""

    exit_code = 4


class DifferenceError(TunebookError):
    """A run differs from the evidence it was compared with."""

    exit_code = 5


class StoppedError(TunebookError):
    """The run was asked to stop and did so cleanly; the scheduler may requeue it."""

    exit_code = 6


class InvalidTrainingError(TunebookError):
    """The training itself is wrong: a loss that is not finite, documents that leak into each other."""

    exit_code = 7


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule: its `id`, the `key` it is about, what is wrong and what to type instead."""

    id: str
    key: str
    message: str
    fix: str
    is_error: bool = True  # False: a warning, and the run can start
    place: str | None = None  # the override or file that set the key; None for a default

    def text(self) -> str:
        """The problem as one paragraph for a terminal."""
        place = f" (from {self.place})" if self.place else ""
        return f"{self.key}{place}: {self.message}\n    fix: {self.fix}   [{self.id}]"


class RulesError(RequestError):
    """Every broken rule of one configuration, reported together; its text leaves warnings out."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        errors = [problem for problem in problems if problem.is_error]
        count = f"{len(errors)} problem{'s' if len(errors) != 1 else ''}"
        lines = "\n".join(f"  {number}. {problem.text()}" for number, problem in enumerate(errors, 1))
        super().__init__(f"this configuration cannot run: {count}\n{lines}", problem_id=errors[0].id)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and the errors that it came from, the latest first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one without a text, its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_few(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first names of a list, and how many more there are."""
    num_more = len(names) - most
    return separator.join(names[:most]) + (f" and {num_more} more" if num_more > 0 else "")


def counted(number: int, unit: str, units: str | None = None) -> str:
    """A number of things, such as `1 GPU` and `2 GPUs`."""
    return f"{number:,} {unit if number == 1 else units or f'{unit}s'}"


def nearest(word: str, known: Iterable[str], *, least_alike: float = 0.6) -> str | None:
    """The known word most similar to `word`; None if its similarity (1 for equal words) is below `least_alike`."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=least_alike)
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """` Did you mean 'x'?` for the closest known spelling; if none is close, the sentence `otherwise`."""
    match = nearest(word, known)
    hint = f"Did you mean '{match}'?" if match else otherwise
    return f" {hint}" if hint else ""
