"""Which configurations are compared: every combination of what is varied, the first being the reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from tunebook.config.schema import RunConfig
from tunebook.errors import DoesNotFitError, RequestError, RulesError

# One optimizer step as often as possible, and nothing that is not about the loss.
_SHARED = ("evaluation=none", "training.log_every_steps=1", "training.save_every_steps=null", "training.resume=never")
_GPUS = "hardware.gpus_per_node"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to train."""

    name: str  # of its folder and its row: the values that set it apart
    varied: tuple[str, ...]  # `key=value` for each key that is varied
    overrides: tuple[str, ...]  # all of them, as `tunebook train` takes them
    refused: str | None = None  # why a rule forbids it; None where it can run


def list_cases(overrides: list[str], over: list[str], gpus: str | None, num_steps: int) -> list[Case]:
    """Every combination, the last key changing fastest. Raises: RequestError for words that cannot be read."""
    varied = [_values(word) for word in over]
    if gpus is not None:
        varied.append([f"{_GPUS}={number}" for number in _numbers(gpus)])
    if not varied:
        raise RequestError(
            "there is nothing to compare; say what to vary, such as --over parallelism=ddp,zero2 or --gpus 1,2",
            problem_id="parity-request",
        )
    shared = (*overrides, *_SHARED, f"training.max_steps={num_steps}")
    cases = [Case(name=_name(words), varied=words, overrides=(*shared, *words)) for words in product(*varied)]
    if len({case.name for case in cases}) < len(cases):
        raise RequestError(
            f"two of the configurations have the same name: {', '.join(case.name for case in cases)}; vary each value "
            "once",
            problem_id="parity-request",
        )
    return cases


def mark_refused(cases: list[Case], plan: Callable[[Case], RunConfig]) -> tuple[list[Case], RunConfig]:
    """The cases with those that a rule forbids marked, and the reference's resolved configuration.

    Not every strategy runs on every number of GPUs, and a table may leave those out. Raises: RequestError when the
    reference itself, or all others, are refused.
    """
    reference = plan(cases[0])
    marked = [cases[0]]
    for case in cases[1:]:
        try:
            plan(case)
        except (RequestError, DoesNotFitError) as error:
            case = replace(case, refused=_why_not(error))
        marked.append(case)
    if all(case.refused for case in marked[1:]):
        reasons = "\n".join(f"  {case.name}: {case.refused}" for case in marked[1:])
        raise RequestError(
            f"there is nothing to compare {cases[0].name} with; the others cannot run:\n{reasons}\nVary something "
            "else, such as --over parallelism=ddp,zero2 --gpus 2",
            problem_id="parity-request",
        )
    return marked, reference


def _why_not(error: RequestError | DoesNotFitError) -> str:
    """A rule, the memory or the batch may forbid a combination. Raises: the error, if it is a name that is wrong."""
    if isinstance(error, RulesError):
        return "; ".join(problem.message for problem in error.problems)
    if isinstance(error, DoesNotFitError) or (error.problem_id or "").startswith("batch-"):
        return error.message
    raise error


def _name(words: tuple[str, ...]) -> str:
    """The values that set a case apart, as the name of a folder: `zero2-x4`."""
    parts = [("x" if key == _GPUS else "") + value for key, value in (word.split("=", 1) for word in words)]
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))


def _values(word: str) -> list[str]:
    key, has_value, values = word.partition("=")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not has_value or not key or not listed:
        raise RequestError(
            f"--over {word}: write it as key=value,value, such as --over parallelism=ddp,zero2",
            problem_id="parity-request",
        )
    return [f"{key}={value}" for value in listed]


def _numbers(gpus: str) -> list[int]:
    try:
        numbers = [int(number) for number in gpus.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise RequestError(f"--gpus {gpus}: write numbers of GPUs, such as --gpus 1,2,4", problem_id="parity-request")
    return numbers
