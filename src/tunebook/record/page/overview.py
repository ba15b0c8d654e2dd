"""The numbers of a run's report: its head, and predictions beside measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from tunebook.config.book import recipe_name
from tunebook.config.choices import Generation
from tunebook.record.metrics import median_after_warm_up
from tunebook.record.page.numbers import MINUS, NO_VALUE, TIMES, Unit, format_duration, format_value
from tunebook.record.run_record import RunRecord

_FINAL_SHARE = 0.05  # of the logged steps, averaged for the final loss: a single step is noisy
_NOT_PARTS = ("total", "allocated", "capacity")  # of the planned memory
_SHORTEST = 0.4  # of the available memory: a shorter bar would be hard to read and is magnified
_PLAN_MISSING = "the plan has no estimate of it"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The main numbers of a run; None for those that were not recorded."""

    num_steps: int | None
    num_planned_steps: int | None
    num_tokens: int | None
    first_loss: float | None
    final_loss: float | None
    num_final_steps: int  # averaged for the final loss
    best_validation_loss: float | None
    tokens_per_second_per_gpu: float | None  # median after warm-up
    mfu: float | None
    peak_memory_gib: list[float]  # by rank
    seconds: float | None  # of all attempts that recorded their end; None if the last did not
    num_attempts: int
    num_attempts_without_end: int  # among the earlier ones


def summarize(record: RunRecord) -> Summary:
    """Compute the numbers from the metrics."""
    training, losses = record.training, record.values("loss")
    num_final = max(1, round(_FINAL_SHARE * len(losses)))
    earlier = [attempt.get("seconds") for attempt in record.manifest.get("earlier_attempts") or []]
    last_seconds = record.status.get("seconds")
    by_rank = zip_longest(*(line["memory_gib"] for line in training if line.get("memory_gib")))
    validation = [line["validation_loss"] for line in record.validation if line["validation_loss"] is not None]
    return Summary(
        num_steps=training[-1]["step"] if training else None,
        num_planned_steps=record.plan.get("batch", {}).get("total_steps"),
        num_tokens=training[-1].get("tokens_seen") if training else None,
        first_loss=losses[0] if losses else None,
        final_loss=fmean(losses[-num_final:]) if losses else None,
        num_final_steps=num_final,
        best_validation_loss=min(validation, default=None),
        tokens_per_second_per_gpu=median_after_warm_up(record.values("tokens_per_second_per_gpu")),
        mfu=median_after_warm_up(record.values("mfu")),
        peak_memory_gib=[max(gib or 0.0 for gib in peaks) for peaks in by_rank],
        seconds=None if last_seconds is None else round(last_seconds + sum(filter(None, earlier)), 1),
        num_attempts=1 + len(earlier),
        num_attempts_without_end=earlier.count(None),
    )


def state_of(record: RunRecord) -> str:
    """The manifest's state, but `invalid` for a finished run with a loss that was not finite."""
    state: str = record.status["state"]
    return "invalid" if state == "finished" and record.first_invalid_step is not None else state


def speed_unit(record: RunRecord) -> str:
    """The unit of a run's speed: `GPU`, or `rank` on a CPU."""
    return "GPU" if is_on_gpus(record) else "rank"


def is_on_gpus(record: RunRecord) -> bool:
    """By the plan: the machine of a CPU run may have GPUs."""
    return bool(record.plan["hardware"]["generation"] != Generation.cpu.name)


def format_time(time: datetime | str) -> str:
    """A point in time such as 21 November 2026, 07:18 UTC."""
    time = datetime.fromisoformat(time) if isinstance(time, str) else time
    return f"{time.day} {time:%B %Y, %H:%M} UTC"


def describe_machine(record: RunRecord) -> str:
    """The number and names of the GPUs, or the number of CPU cores."""
    hardware, world_size = record.manifest["hardware"], record.manifest["world_size"]
    if not hardware["gpus"]:
        return f"CPU, {hardware['cpus']} cores" + (f", {world_size} ranks" if world_size > 1 else "")
    names = Counter(gpu["name"] for gpu in hardware["gpus"])
    gpus = ", ".join(f"{count} {TIMES} {name}" for name, count in names.items())
    return f"{gpus}; {world_size} used" if world_size != len(hardware["gpus"]) else gpus


def describe_duration(summary: Summary) -> str:
    """The time of all attempts together, such as 1 min 16 s, 2 attempts."""
    if summary.seconds is None:
        return "not recorded"
    text = format_duration(summary.seconds)
    if summary.num_attempts > 1:
        text += f", {summary.num_attempts} attempts"
    if summary.num_attempts_without_end:
        text += f"; without the time of {summary.num_attempts_without_end} that recorded no end"
    return text


def recipe_of(record: RunRecord) -> str:
    """A run's recipe; without one the last parts of its data's paths."""
    if recipe := record.manifest["recipe"]:
        return recipe_name(recipe)
    return ", ".join(_last_part(one["location"]) for one in record.manifest["dataset"]["records"])


def title_of(record: RunRecord) -> str:
    """The title or recipe of a run; without one the last parts of its model's and data's paths."""
    manifest, recipe = record.manifest, recipe_of(record)
    if title := record.config["title"] or (recipe if manifest["recipe"] else ""):
        return str(title)
    return f"{_last_part(manifest['model']['name'])} on {recipe}"


def _last_part(name: str) -> str:
    """Of a path; a name of the hub as it is."""
    return Path(name).name if name.startswith(("/", "~", "book:")) else name


def main_score(record: RunRecord) -> tuple[str, dict[str, Any], dict[str, Any] | None] | None:
    """The first task's name, its score after training, and the one before; None without an evaluation."""
    tasks, before = (evaluation.get("tasks", {}) for evaluation in (record.after, record.before))
    return next(((name, task, before.get(name)) for name, task in tasks.items()), None)


def validation_of_model(record: RunRecord) -> dict[str, Any] | None:
    """The validation of the weights in model/, if the best were loaded."""
    best = record.status.get("best_step")
    return next((line for line in reversed(record.validation) if line["step"] == best), None)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A labelled stretch of a horizontal bar, as shares of its full width."""

    name: str
    text: str
    share: float = 0.0
    begins: float = 0.0
    kind: str = ""  # CSS class


def build_prediction(record: RunRecord, summary: Summary) -> dict[str, Any]:
    """The plan's estimates beside the measurements.

    `parts` of the planned memory of one GPU or rank, end to end; `marks` of the measured peaks; `scale` of both; `rows`
    of name, predicted, measured and the difference; `notes` on what the predictions assume, or why there are none.
    """
    planned, time = record.plan.get("memory_gib") or {}, record.plan.get("time") or {}
    notes = [] if planned else [f"Memory: {_PLAN_MISSING}."]
    if measured := record.plan.get("measured"):
        notes.append(f"Memory: the peak is that of two steps measured on {measured['date']}; its parts are estimates.")
    notes.append(f"Speed, {time.get('assumption') or f'not estimated: {_PLAN_MISSING}'}.")
    keys = ("memory_gib", "memory_reserved_gib", "memory_device_gib")
    logged = [[gib for line in record.training for gib in line.get(key) or [] if gib is not None] for key in keys]
    peaks = [max(values, default=None) for values in logged]
    parts, marks, scale = _memory_stack(planned, peaks, is_on_gpus(record))
    rows = []
    if planned and not is_on_gpus(record):
        rows = [_compared("Peak memory of a rank", planned.get("total"), peaks[0], Unit.gib)]
    elif planned:
        rows = [
            _compared("Peak memory of tensors", planned.get("allocated"), peaks[0], Unit.gib),
            _compared("Memory of the GPU in use", planned.get("total"), peaks[2], Unit.gib),
        ]
    speed = time.get("tokens_per_second_per_gpu")
    name = f"Tokens per second and {speed_unit(record)}"
    rows.append(_compared(name, speed, summary.tokens_per_second_per_gpu, Unit.plain))
    is_complete = summary.num_steps is not None and summary.num_steps == summary.num_planned_steps
    trained = sum(record.values("seconds")) if is_complete else 0.0
    planned_s = time["hours"] * 3600 if time.get("hours") is not None else None
    rows.append(_compared("Time of the whole training", planned_s, trained or None, Unit.seconds))
    return {"parts": parts, "marks": marks, "scale": scale, "rows": rows, "notes": notes}


def _memory_stack(
    planned: dict[str, float | None], peaks: list[float | None], is_gpu: bool
) -> tuple[list[Bar], list[Bar], str]:
    values = {name: value or 0.0 for name, value in planned.items() if name not in _NOT_PARTS}
    if not any(values.values()):
        return [], [], ""
    names = {
        "allocated": "measured peak of tensors" if is_gpu else "measured peak of the process",
        "reserved": "measured peak reserved for them",
        "device": "measured in use of the GPU",
    }
    measured = {kind: gib for kind, gib in zip(names, peaks, strict=True) if gib is not None}
    longest, capacity = max([sum(values.values()), *measured.values()]), planned.get("capacity")
    full = max(longest, capacity if capacity and longest >= _SHORTEST * capacity else longest * 1.05)
    parts, begins = [], 0.0
    for color, (name, value) in enumerate(values.items()):
        if value:  # an empty part is omitted but keeps its color: a part has the same color in every report
            text, share = format_value(value, Unit.gib), value / full
            parts.append(Bar(name=name, text=text, begins=begins, share=share, kind=str(color % 6)))
            begins += share
    marks = [
        Bar(name=names[kind], text=format_value(gib, Unit.gib), begins=gib / full, kind=kind)
        for kind, gib in measured.items()
    ]
    if capacity is None:
        return parts, marks, ""
    whose, size = "one GPU" if is_gpu else "one rank's share of this machine", format_value(capacity, Unit.gib)
    scale = f"The full width is the {size} of {whose}."
    if full > capacity:
        scale = f"This is more than the {size} of {whose}."
    elif full < capacity:
        scale = f"The bar is magnified: {whose} has {size}."
    return parts, marks, scale


def _compared(name: str, predicted: float | None, measured: float | None, unit: Unit) -> tuple[str, str, str, str]:
    difference = NO_VALUE
    if predicted is not None and measured:
        difference = format_value(predicted / measured - 1, Unit.share)
        difference = difference if difference.startswith(MINUS) else f"+{difference}"
    text = "not estimated" if predicted is None else format_value(predicted, unit)
    return name, text, format_value(measured, unit), difference
