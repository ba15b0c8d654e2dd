"""List the configurations of a parity: every combination of the varied values. The first is the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import product

from tunebook.config.choices import MasterWeights
from tunebook.config.override_text import split_values
from tunebook.config.schema import RunConfig
from tunebook.errors import DoesNotFitError, RequestError, RulesError

# Log the loss of every step, and omit what does not affect it.
_SHARED = (
    "evaluation=none",
    "training.log_every_steps=1",
    "training.save_every_steps=null",
    "training.load_best_at_end=false",
    "training.early_stopping_patience=null",
    "training.resume=never",
)
_GPUS, _STEPS, _WEIGHTS = "hardware.gpus_per_node", "training.max_steps", "precision.master_weights"
_LONGEST_NAME = 80  # of a folder; file systems allow 255 bytes


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to train."""

    name: str  # of its folder and row: the varied values
    varied: tuple[str, ...]  # `key=value` for each key that is varied
    overrides: tuple[str, ...]  # all overrides, as for `tunebook train`
    refused: str | None = None  # why a rule forbids it; None if it can run


def list_cases(overrides: list[str], over: list[str], gpus: str | None, num_steps: int) -> list[Case]:
    """Return every combination; the last key changes fastest. Raises: RequestError for unreadable overrides."""
    varied = [_values(word) for word in over]
    if gpus is not None:
        varied.append([f"{_GPUS}={number}" for number in _numbers(gpus)])
    if not varied:
        raise RequestError(
            "there is nothing to compare; say what to vary, such as --over parallelism=ddp,zero2 or --gpus 1,2",
            problem_id="parity-request",
        )
    _refuse_steps([*overrides, *(value for values in varied for value in values)], num_steps)
    combinations = list(product(*varied))
    if len(combinations) == 1:
        raise RequestError(
            f"only one configuration is named, {' '.join(combinations[0])}, and there is nothing to compare it with; "
            f"name at least two values, such as {_second(combinations[0][0])}",
            problem_id="parity-request",
        )
    names = _names(combinations)
    aside = words_set_aside(overrides, over, gpus)
    shared = (*(word for word in overrides if word not in aside), *_SHARED, f"{_STEPS}={num_steps}")
    return [
        Case(name=name, varied=words, overrides=(*shared, *words))
        for name, words in zip(names, combinations, strict=True)
    ]


def words_set_aside(overrides: list[str], over: list[str], gpus: str | None) -> list[str]:
    """Return the overrides that no configuration gets, because a parity sets or varies their keys itself."""
    varied = {_key(word) for word in over} | ({_GPUS} if gpus is not None else set())
    taken = varied | {_key(word) for word in _SHARED}
    if "evaluation" not in varied:
        taken |= {_key(word) for word in overrides if word.startswith("evaluation.")}
    return [word for word in overrides if _key(word) in taken and word not in _SHARED]


def mark_refused(cases: list[Case], plan: Callable[[Case], RunConfig]) -> tuple[list[Case], RunConfig]:
    """Return the cases, with `refused` set if a rule forbids one, and the reference's resolved configuration.

    Not every strategy runs on every number of GPUs. Raises: RequestError if the reference or all others are refused.
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


def weights_alike(cases: list[Case], formats: Collection[MasterWeights]) -> list[Case]:
    """Return the cases, all with fp32 weights if they were planned with several `formats`.

    With some strategies `auto` keeps a frozen base in bf16. That is not compared unless the format itself is varied.
    """
    if len(set(formats)) < 2 or any(_key(word) == _WEIGHTS for word in cases[0].varied):
        return cases
    return [replace(case, overrides=(*case.overrides, f"{_WEIGHTS}={MasterWeights.fp32.name}")) for case in cases]


def _why_not(error: RequestError | DoesNotFitError) -> str:
    """Return the reason if a rule, the memory or the batch forbids a combination. Raises: any other error."""
    if isinstance(error, RulesError):
        return "; ".join(problem.message for problem in error.problems)
    if isinstance(error, DoesNotFitError) or (error.problem_id or "").startswith("batch-"):
        return error.message
    raise error


def _refuse_steps(words: list[str], num_steps: int) -> None:
    """Raises: RequestError for an override of the number of steps, which is the option --steps."""
    for word in words:
        if _key(word) == _STEPS:
            value = word.partition("=")[2].strip()
            raise RequestError(
                f"{word}: all runs of a parity take the same number of steps, which is an option; type "
                f"--steps {value if value.isdecimal() and int(value) else num_steps} in its place",
                problem_id="parity-request",
            )


def _key(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("+~")


def _second(word: str) -> str:
    """Return an example with a second value for an option that has only one."""
    key, _, value = word.partition("=")
    return f"--gpus {value},{2 * int(value)}" if key == _GPUS and value.isdecimal() else f"--over {word},ANOTHER"


def _names(combinations: list[tuple[str, ...]]) -> list[str]:
    """Return the folder name of each case. A long or repeated name is truncated and ends with the number of its case.

    Raises: RequestError if a combination is repeated.
    """
    names = [_name(words) for words in combinations]
    if len(set(combinations)) == len(combinations):
        names = [
            f"{name[:_LONGEST_NAME]}-{number}" if _needs_number(name, names) else name
            for number, name in enumerate(names, 1)
        ]
    if len(set(names)) < len(names):
        raise RequestError(
            f"two of the configurations have the same name: {', '.join(names)}; vary each value once",
            problem_id="parity-request",
        )
    return names


def _needs_number(name: str, names: list[str]) -> bool:
    return len(name) > _LONGEST_NAME or names.count(name) > 1 or not name.strip(".")  # `.` and `..` are other folders


def _name(words: tuple[str, ...]) -> str:
    """Return the varied values as a folder name, such as `zero2-x4`."""
    parts = [("x" if key == _GPUS else "") + value for key, value in (word.split("=", 1) for word in words)]
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))


def _values(word: str) -> list[str]:
    key, has_value, values = word.partition("=")
    listed = [value.strip() for value in split_values(values) if value.strip()]
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
