"""A target of evidence: a metric, a value, and the steps to reach it in, such as `validation_loss<=2.1@200`.

The value is reached

- of `loss` at the end of the first window of steps whose mean loss is low enough (the windows of the loss' tolerance,
  since a single step's loss may be low by chance),
- of `validation_loss` at the first validation that is low enough,
- of a task's metric at the end of the training, after which the task is evaluated.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tunebook.errors import RequestError, did_you_mean
from tunebook.evidence.compare import Row, Verdict
from tunebook.evidence.schema import Repeat, Target
from tunebook.evidence.tolerances import split_windows
from tunebook.record.run_record import RunRecord

LOSS, VALIDATION_LOSS = "loss", "validation_loss"
EXAMPLES = "--target 'validation_loss<=2.1@200' or --target 'boolq:acc>=0.70'"
_SIGNS = {"at_most": "<=", "at_least": ">="}
_HOLDS = {"at_most": operator.le, "at_least": operator.ge}
_TEXT = re.compile(r"(?P<name>[^<>=]+)(?P<sign><=|>=)(?P<value>[^<>=@]+)(?:@(?P<steps>[^@]*))?")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run came towards a target."""

    best: float | None  # the best value within the target's steps; None if there is none
    steps: int | None = None  # when the target was reached; None if it was missed
    seconds: float | None = None  # of training until then; None if the run did not record the time of every step


def parse_target(text: str) -> Target:
    """Parse `METRIC<=VALUE`, `TASK:METRIC>=VALUE`, each with an optional `@STEPS`.

    Raises: RequestError for another form, an unknown metric, a value that is not finite, or less than one step.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        has_comparison = any(sign in text for sign in "<>=")
        why = "is not METRIC<=VALUE@STEPS" if has_comparison else "has no comparison, which a shell takes if not quoted"
        raise _invalid(text, why)
    task, _, metric = found["name"].strip().rpartition(":")
    direction = "at_most" if found["sign"] == "<=" else "at_least"
    if not metric or (not task and ":" in found["name"]):
        raise _invalid(text, f"'{found['name']}' is not TASK:METRIC")
    if not task and metric not in (LOSS, VALIDATION_LOSS):
        guess = did_you_mean(metric, (LOSS, VALIDATION_LOSS))
        raise _invalid(text, f"{metric} is no metric; there are {LOSS}, {VALIDATION_LOSS} and TASK:METRIC.{guess}")
    if not task and direction == "at_least":
        raise _invalid(
            text, f"a loss is better when it is lower, so its target is '{metric}<={found['value'].strip()}'"
        )
    value, steps = _number(text, found["value"]), found["steps"]
    return Target.model_validate(
        {"metric": metric, "task": task or None, "value": value, "direction": direction,
         "max_steps": None if steps is None else _steps(text, steps)}
    )  # fmt: skip


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _invalid(text, f"'{value.strip()}' is not a finite number")
    return number


def _steps(text: str, steps: str) -> int:
    if not re.fullmatch(r"[0-9]+", steps) or int(steps) < 1:
        raise _invalid(text, f"'{steps}' is not a number of optimizer steps, 1 or more")
    return int(steps)


def _invalid(text: str, why: str) -> RequestError:
    return RequestError(f"--target '{text}': {why}; type {EXAMPLES}, with the quotes", problem_id="evidence-target")


def describe_target(target: Target) -> str:
    """Such as `boolq:acc >= 0.7 within 200 steps`."""
    name = f"{target.task}:{target.metric}" if target.task else target.metric
    within = f" within {target.max_steps:,} steps" if target.max_steps is not None else ""
    return f"{name} {_SIGNS[target.direction]} {target.value:g}{within}"


def require_measured(target: Target, record: RunRecord) -> None:
    """Raises: RequestError if the run does not measure the target's metric, with the nearest name that it does."""
    if target.task is not None:
        _require_task(target, record)
    elif target.metric == VALIDATION_LOSS and not record.validation:
        raise _unmeasured(
            target, f"{record.name} has no validation; choose {LOSS} or a task, or train with a validation part "
            "(dataset.validation_share=0.01)"
        )  # fmt: skip


def _require_task(target: Target, record: RunRecord) -> None:
    tasks: Mapping[str, Any] = (record.after or {}).get("tasks", {})
    task = tasks.get(target.task or "")
    if task is None:
        known = f"its tasks are {', '.join(tasks)}" if tasks else "none was evaluated (evaluation=tasks)"
        guess = did_you_mean(target.task or "", tasks)
        raise _unmeasured(target, f"{record.name} has no score of {target.task}: {known}.{guess}")
    if task["metric"] != target.metric:
        raise _unmeasured(target, f"{target.task} is scored by {task['metric']}; type {target.task}:{task['metric']}")
    better: bool | None = task.get("higher_is_better")
    if better is not None and better != (target.direction == "at_least"):
        sign, way = (">=", "higher") if better else ("<=", "lower")
        raise _unmeasured(target, f"{target.metric} is better when it is {way}; type {sign}")


def _unmeasured(target: Target, why: str) -> RequestError:
    return RequestError(f"--target '{describe_target(target)}': {why}", problem_id="evidence-target")


def progress_of(target: Target, record: RunRecord) -> Progress:
    """When the run reached the target, or else the best value that it had within the target's steps."""
    values = [
        (step, value) for step, value in _values(target, record) if target.max_steps is None or step <= target.max_steps
    ]
    holds = _HOLDS[target.direction]
    for step, value in values:
        if holds(value, target.value):
            return Progress(best=value, steps=step, seconds=training_seconds(record, step))
    best = min if target.direction == "at_most" else max
    return Progress(best=best((value for _, value in values), default=None))


def _values(target: Target, record: RunRecord) -> list[tuple[int, float]]:
    """(step, value) of the target's metric, in order."""
    if target.task is not None:
        task: dict[str, Any] | None = (record.after or {}).get("tasks", {}).get(target.task)
        if task is None or task["metric"] != target.metric or task["value"] is None:
            return []
        return [(int(record.training[-1]["step"]), task["value"])]
    if target.metric == VALIDATION_LOSS:
        lines = [(line["step"], line["validation_loss"]) for line in record.validation]
        return [(step, loss) for step, loss in lines if loss is not None]
    losses = [(step, loss) for step, loss in record.scheduled_losses() if loss is not None]
    return [(window[-1][0], fmean(loss for _, loss in window)) for window in split_windows(losses)]


def training_seconds(record: RunRecord, step: int) -> float | None:
    """Seconds of optimizer steps, with their data loading, from the first step to the end of this one.

    Not counted are the start-up, validations, saves, and steps that an interrupted run trained again. Of a line over
    several steps each counts the same. None if the run lacks the time of a step.
    """
    seconds, done = 0.0, 0
    for line in record.training:
        if done >= step:
            break
        num_steps = line.get("num_steps", line["step"] - done)  # older lines lack it
        if line["step"] - num_steps != done or line.get("seconds") is None:
            return None
        seconds += line["seconds"] * min(1.0, (step - done) / num_steps)
        done = line["step"]
    return round(seconds, 2) if done >= step else None


def target_row(target: Target, record: RunRecord, repeats: Sequence[Repeat]) -> Row:
    """Judge a run by a target; `repeats` are the recorded runs, without steps if their target was another."""
    found = progress_of(target, record)
    if found.steps is not None:
        verdict, why = Verdict.reached, reached_text([found.steps], [found.seconds])
    else:
        within = "" if target.max_steps is None else f" within {target.max_steps:,} steps"
        has_none = "the run does not measure it" if target.task or target.metric != LOSS else "the run logged none"
        why = has_none if found.best is None else f"the best value{within} is shown"
        verdict = Verdict.missed
    if any(repeat.steps_to_target is not None for repeat in repeats):
        why += f"; recorded: {recorded_text(repeats)}"
    return Row(
        name=f"target: {describe_target(target)}", expected=target.value, found=found.best, verdict=verdict, why=why
    )


def recorded_text(repeats: Sequence[Repeat]) -> str:
    """When the recorded runs reached their target; on a CPU those with the first one's processor and threads."""
    alike = [repeat for repeat in repeats if repeat.processor is None]
    steps = [repeat.steps_to_target for repeat in alike if repeat.steps_to_target is not None]
    return reached_text(steps, [repeat.time_to_target_s for repeat in alike])


def reached_text(steps: Sequence[int], seconds: Sequence[float | None]) -> str:
    """Such as `reached at step 200, after 61 to 65 s of training`."""
    known = [one for one in seconds if one is not None]
    time = f", after {_range(known)} s of training" if known else ""
    return f"reached at step {_range(steps)}{time}"


def _range(values: Sequence[float]) -> str:
    """Such as `61 to 65`, or `61` if all are the same."""
    least, most = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
