"""The main numbers of a run, and what the head of its report says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from tunebook.config.choices import Generation
from tunebook.record.metrics import median_after_warm_up
from tunebook.record.page.numbers import TIMES, format_duration
from tunebook.record.run_record import RunRecord

_FINAL_SHARE = 0.05  # of the logged steps, averaged for the final loss: a single step is noisy
_NOT_RECORDED = "not recorded"


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
    padding_share: float | None
    peak_memory_gib: list[float]  # by rank
    seconds: float | None  # of all attempts that recorded their end; None if the last did not
    num_attempts: int
    num_attempts_without_end: int  # among the earlier ones


def summarize(record: RunRecord) -> Summary:
    """Compute the numbers from the metrics."""
    training, losses = record.training, record.values("loss")
    num_final = max(1, round(_FINAL_SHARE * len(losses)))
    earlier = [attempt.get("seconds") for attempt in (record.manifest or {}).get("earlier_attempts") or []]
    last_seconds = record.status.get("seconds")
    by_rank = zip_longest(*(line["memory_gib"] for line in training if line.get("memory_gib")))
    validation = [line["validation_loss"] for line in record.validation if line["validation_loss"] is not None]
    return Summary(
        num_steps=training[-1]["step"] if training else None,
        num_planned_steps=record.plan["batch"].get("total_steps") if record.plan and "batch" in record.plan else None,
        num_tokens=training[-1].get("tokens_seen") if training else None,
        first_loss=losses[0] if losses else None,
        final_loss=fmean(losses[-num_final:]) if losses else None,
        num_final_steps=num_final,
        best_validation_loss=min(validation, default=None),
        tokens_per_second_per_gpu=median_after_warm_up(record.values("tokens_per_second_per_gpu")),
        mfu=median_after_warm_up(record.values("mfu")),
        padding_share=_padding_share(training),
        peak_memory_gib=[max(gib or 0.0 for gib in peaks) for peaks in by_rank],
        seconds=None if last_seconds is None else round(last_seconds + sum(filter(None, earlier)), 1),
        num_attempts=1 + len(earlier),
        num_attempts_without_end=earlier.count(None),
    )


def _padding_share(lines: list[dict[str, Any]]) -> float | None:
    """Share of all computed tokens. Each line's share is weighted by the tokens computed since the line before."""
    real, computed, before = 0.0, 0.0, 0
    for line in lines:
        share, seen = line.get("padding_share"), line.get("tokens_seen") or before
        if share is not None and share < 1:
            real += seen - before
            computed += (seen - before) / (1 - share)
        before = seen
    return 1 - real / computed if computed else None


def state_of(record: RunRecord) -> str:
    """The manifest's state, but `invalid` for a finished run with a loss that was not finite."""
    state = record.status.get("state", "unknown")
    return "invalid" if state == "finished" and record.first_invalid_step is not None else state


def speed_unit(records: Sequence[RunRecord]) -> str:
    """The unit of these runs' speeds: `GPU`, `rank` for runs on a CPU, or both."""
    return " or ".join(sorted({"GPU" if is_on_gpus(record) else "rank" for record in records}))


def is_on_gpus(record: RunRecord) -> bool:
    """By the configuration, else the plan: the machine of a CPU run may have GPUs."""
    found = [(source or {}).get("hardware") or {} for source in (record.config, record.plan)]
    generation = next((one["generation"] for one in found if "generation" in one), Generation.cpu.name)
    return bool(generation != Generation.cpu.name)


def format_time(time: datetime | str | None) -> str:
    """A point in time such as 21 November 2026, 07:18 UTC."""
    if time is None:
        return _NOT_RECORDED
    time = datetime.fromisoformat(time) if isinstance(time, str) else time
    return f"{time.day} {time:%B %Y, %H:%M} UTC"


def describe_machine(record: RunRecord) -> str:
    """The number and names of the GPUs, or the number of CPU cores."""
    if record.manifest is None:
        return _NOT_RECORDED
    hardware, world_size = record.manifest["hardware"], record.manifest["world_size"]
    if not hardware["gpus"]:
        return f"CPU, {hardware['cpus']} cores" + (f", {world_size} ranks" if world_size > 1 else "")
    names = Counter(gpu["name"] for gpu in hardware["gpus"])
    found = ", ".join(f"{count} {TIMES} {name}" for name, count in names.items())
    return f"{found}; {world_size} used" if world_size != len(hardware["gpus"]) else found


def describe_duration(summary: Summary) -> str:
    """The time of all attempts together, such as 1 min 16 s, 2 attempts."""
    if summary.seconds is None:
        return _NOT_RECORDED
    text = format_duration(summary.seconds)
    if summary.num_attempts > 1:
        text += f", {summary.num_attempts} attempts"
    if summary.num_attempts_without_end:
        text += f"; without the time of {summary.num_attempts_without_end} that recorded no end"
    return text


def recipe_of(record: RunRecord) -> str | None:
    """A run's recipe; without a manifest the name of the parent folder. None for a run without a recipe."""
    return record.folder.parent.name if record.manifest is None else record.manifest["recipe"]


def title_of(record: RunRecord) -> str:
    """The title or recipe of a run; without one the last parts of its model's and data's paths."""
    if title := (record.config or {}).get("title") or recipe_of(record):
        return str(title)
    manifest = record.manifest or {}
    names = [manifest["model"]["name"], *(one["location"] for one in (manifest["dataset"] or {}).get("records", []))]
    model, *data = (Path(name).name if name.startswith(("/", "~", "book:")) else name for name in names)
    return f"{model} on {', '.join(data)}" if data else str(model)


def main_score(record: RunRecord) -> tuple[str, dict[str, Any], dict[str, Any] | None] | None:
    """The first task's name, its score after training, and the one before; None without an evaluation."""
    tasks, before = ((evaluation or {}).get("tasks") or {} for evaluation in (record.after, record.before))
    return next(((name, task, before.get(name)) for name, task in tasks.items()), None)


def validation_of_model(record: RunRecord) -> float | None:
    """The validation loss of the weights in model/, if the best were loaded."""
    best = record.status.get("best_step")
    return next((line["validation_loss"] for line in reversed(record.validation) if line["step"] == best), None)
