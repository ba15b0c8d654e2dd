"""A target of evidence: a metric, a value, and the steps to reach it in, such as `validation_loss<=2.1@200`.

The value is reached

- of `loss` at the end of the first window of steps whose mean loss is low enough (the windows of the loss' tolerance,
  since a single step's loss may be low by chance),
- of `validation_loss`, and of a method's own metrics such as `validation_reward_accuracy`, at the first validation that
  is good enough,
- of a task's metric at the end of the training, after which the task is evaluated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from tunebook.errors import RequestError
from tunebook.evidence.schema import Repeat, Target
from tunebook.evidence.tolerances import split_windows
from tunebook.facts.methods import VALIDATION_METRICS
from tunebook.record.run_record import RunRecord

LOSS, VALIDATION_LOSS = "loss", "validation_loss"
_SIGNS = {"at_most": "<=", "at_least": ">="}
_HOLDS = {"at_most": operator.le, "at_least": operator.ge}
_TEXT = re.compile(
    r"(?:(?P<task>[^<>=]+):)?(?P<metric>[^<>=:]+)(?P<sign><=|>=)(?P<value>[^<>=@]+)(?:@(?P<max_steps>\d+))?"
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run came towards a target."""

    best: float | None  # the best value within the target's steps; None if there is none
    steps: int | None = None  # when the target was reached; None if it was missed
    seconds: float | None = None  # of training until then


def parse_target(text: str) -> Target:
    """Parse `METRIC<=VALUE`, `TASK:METRIC>=VALUE`, each with an optional `@STEPS`. Raises: RequestError."""
    match = _TEXT.fullmatch(text.replace(" ", ""))
    is_of_run = match is not None and (
        match["metric"] in VALIDATION_METRICS or (match["metric"] in (LOSS, VALIDATION_LOSS) and match["sign"] == "<=")
    )
    if match is not None and (match["task"] is not None or is_of_run):
        direction = "at_most" if match["sign"] == "<=" else "at_least"
        parts = {key: match[key] for key in ("task", "metric", "value", "max_steps")}
        try:
            return Target.model_validate(parts | {"direction": direction})
        except ValidationError:
            pass
    raise RequestError(
        f"--target '{text}' is none of loss<=VALUE, validation_loss<=VALUE, TASK:METRIC>=VALUE and METRIC>=VALUE with "
        f"one of {', '.join(VALIDATION_METRICS)}, with @STEPS or without; type, with the quotes, --target "
        "'validation_loss<=2.1@200' or --target 'boolq:acc>=0.70'",
        problem_id="evidence-target",
    )


def describe_target(target: Target) -> str:
    """Such as `boolq:acc >= 0.7 within 200 steps`."""
    within = f" within {target.max_steps:,} steps" if target.max_steps is not None else ""
    return f"{_name(target)} {_SIGNS[target.direction]} {target.value:g}{within}"


def progress_of(target: Target, record: RunRecord) -> Progress:
    """When the run reached the target, or else the best value that it had within the target's steps."""
    values = [
        (step, value)
        for step, value in _measured(record).get(_name(target), [])
        if target.max_steps is None or step <= target.max_steps
    ]
    for step, value in values:
        if _HOLDS[target.direction](value, target.value):
            return Progress(best=value, steps=step, seconds=_training_seconds(record, step))
    best = min if target.direction == "at_most" else max
    return Progress(best=best((value for _, value in values), default=None))


def _name(target: Target) -> str:
    return f"{target.task}:{target.metric}" if target.task else target.metric


def _measured(record: RunRecord) -> dict[str, list[tuple[int, float]]]:
    """(step, value) in order of every metric that a run measured, by the name that a target has."""
    losses = [(step, loss) for step, loss in record.scheduled_losses() if loss is not None]
    metrics = {LOSS: [(window[-1][0], fmean(loss for _, loss in window)) for window in split_windows(losses)]}
    if record.validation:
        validation = [(line["step"], line["validation_loss"]) for line in record.validation]
        metrics[VALIDATION_LOSS] = [(step, loss) for step, loss in validation if loss is not None]
    for name in VALIDATION_METRICS:
        found = [(line["step"], line[name]) for line in record.validation if line.get(name) is not None]
        metrics |= {name: found} if found else {}
    tasks: dict[str, Any] = record.after.get("tasks", {})
    for name, task in tasks.items():
        if task["value"] is not None:
            metrics[f"{name}:{task['metric']}"] = [(int(record.training[-1]["step"]), task["value"])]
    return metrics


def _training_seconds(record: RunRecord, step: int) -> float:
    """Seconds of optimizer steps, with their data loading, as logged until a step; without start-up and validations."""
    seconds: list[float] = [line["seconds"] for line in record.training if line["step"] <= step]
    return round(sum(seconds), 2)


def recorded_text(repeats: Sequence[Repeat]) -> str:
    """When the recorded runs reached their target."""
    steps = [repeat.steps_to_target for repeat in repeats if repeat.steps_to_target is not None]
    return reached_text(steps, [repeat.time_to_target_s for repeat in repeats])


def reached_text(steps: Sequence[int], seconds: Sequence[float | None]) -> str:
    """Such as `reached at step 200, after 61 to 65 s of training`."""
    known = [value for value in seconds if value is not None]
    time = f", after {_range(known)} s of training" if known else ""
    return f"reached at step {_range(steps)}{time}"


def _range(values: Sequence[float]) -> str:
    """Such as `61 to 65`, or `61` if all are the same."""
    least, most = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
