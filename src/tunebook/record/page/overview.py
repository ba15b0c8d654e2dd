"""The head of a run's report: what ran, how it ended, and its main numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from tunebook.config.choices import Generation
from tunebook.record.locks import describe_differences
from tunebook.record.metrics import median_after_warm_up
from tunebook.record.page.numbers import TIMES, Unit, format_count, format_duration, format_value
from tunebook.record.page.scores import unit_of
from tunebook.record.run_record import RunRecord
from tunebook.record.start_up import COMPILED_KEY

_STATE_WORDS = {
    "finished": "finished",
    "stopped": "stopped on request",
    "failed": "failed",
    "invalid": "invalid",
    "running": "not ended",
    "unknown": "no manifest",
}
_NUM_DIFFERENCES = 4  # packages that the head lists; the manifest below lists all
_FINAL_SHARE = 0.05  # of the logged steps, averaged for the final loss: a single step is noisy
NO_RECIPE = "none (own model and data)"
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


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number in large type."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The head of the report."""

    title: str
    name: str
    state: str
    state_word: str
    banner: list[str]  # sentences; empty for a run that finished and whose numbers are valid
    facts: list[tuple[str, str]]
    figures: list[Figure]


def summarize(record: RunRecord) -> Summary:
    """Compute the numbers from the metrics."""
    training, losses = record.training, record.values("loss")
    num_final = max(1, round(_FINAL_SHARE * len(losses)))
    earlier = [attempt.get("seconds") for attempt in (record.manifest or {}).get("earlier_attempts") or []]
    last_seconds = record.status.get("seconds")
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
        peak_memory_gib=_peaks_by_rank([line["memory_gib"] for line in training if line.get("memory_gib")]),
        seconds=None if last_seconds is None else round(last_seconds + sum(filter(None, earlier)), 1),
        num_attempts=1 + len(earlier),
        num_attempts_without_end=earlier.count(None),
    )


def _padding_share(lines: list[dict[str, Any]]) -> float | None:
    """Share of all computed tokens. Each line's share is weighted by the tokens computed since the line before."""
    shares: list[float] = []
    computed: list[float] = []
    before = 0
    for line in lines:
        share, seen = line.get("padding_share"), line.get("tokens_seen") or before
        if share is not None and share < 1 and seen > before:
            shares.append(share)
            computed.append((seen - before) / (1 - share))
        before = seen
    return fmean(shares, computed) if shares else None


def _peaks_by_rank(lines: list[list[float | None]]) -> list[float]:
    num_ranks = max(map(len, lines), default=0)
    return [max((line[rank] or 0.0 for line in lines if rank < len(line)), default=0.0) for rank in range(num_ranks)]


def build_overview(record: RunRecord, summary: Summary) -> Overview:
    """The head of the report from the recorded facts."""
    state = state_of(record)
    return Overview(
        title=(record.config or {}).get("title") or recipe_of(record) or _untitled(record.manifest or {}),
        name=record.name,
        state=state,
        state_word=_STATE_WORDS[state],
        banner=[*_changed(record), *_explain_end(record, summary, state)],
        facts=_facts(record, summary),
        figures=_figures(record, summary),
    )


def state_of(record: RunRecord) -> str:
    """The manifest's state, but `invalid` for a finished run with a loss that was not finite."""
    state = record.status.get("state", "unknown")
    return "invalid" if state == "finished" and record.first_invalid_step is not None else state


def _changed(record: RunRecord) -> list[str]:
    return [
        f"{name} was changed after the run: its hash differs from the manifest's, so its numbers may not be those that "
        "were measured."
        for name in record.changed_files
    ]


def _explain_end(record: RunRecord, summary: Summary, state: str) -> list[str]:
    status = record.status
    reason = status.get("reason") or ""
    reason = reason and reason[0].upper() + reason[1:] + ("" if reason.endswith((".", "!", "?")) else ".")
    until = f"after step {summary.num_steps}" if summary.num_steps else "before the first step was logged"
    checkpoint = status.get("last_checkpoint")
    saved = f"Last good checkpoint: {checkpoint}." if checkpoint else "No checkpoint of it is recorded."
    match state:
        case "finished":
            return []
        case "invalid":
            step = record.first_invalid_step
            where = f"The loss was not finite at step {step}." if step is not None else ""
            return [f"This training is invalid. {reason or where}", f"Do not use its numbers as a result. {saved}"]
        case "stopped":
            again = "Starting it again with training.resume=auto"
            if checkpoint:
                resume = f"{again} resumes from there."
            elif (record.folder / "model").is_dir():
                resume = f"Its model is fully trained. {again} completes the remaining work."
            else:
                resume = "Starting it again begins at the first step."
            unfinished = f"This run was stopped on request {until}, so it is not finished. {reason}"
            return [unfinished, f"{saved} {resume}"]
        case "failed":
            failed = f"This run failed {until} with exit code {status.get('exit_code')}. {reason}"
            return [failed, f"What it recorded until then is below. {saved}"]
        case "running":
            when = f", at {format_time(record.last_logged)}" if record.last_logged else ""
            return [f"This run has not recorded its end: it is still running, or it was killed {until}{when}."]
    return ["This folder has no manifest.json: how the run ended, and what it was made from, is not recorded."]


def speed_unit(records: Sequence[RunRecord]) -> str:
    """The unit of these runs' speeds: `GPU`, `rank` for runs on a CPU, or both."""
    return " or ".join(sorted({"GPU" if is_on_gpus(record) else "rank" for record in records}))


def is_on_gpus(record: RunRecord) -> bool:
    """By configuration or plan, since a CPU run's machine may have GPUs; else by the detected hardware."""
    for source in (record.config, record.plan):
        if generation := ((source or {}).get("hardware") or {}).get("generation"):
            return bool(generation != Generation.cpu.name)
    return bool(((record.manifest or {}).get("hardware") or {}).get("gpus"))


def format_time(time: datetime | str | None) -> str:
    """A point in time such as 21 November 2026, 07:18 UTC."""
    if time is None:
        return _NOT_RECORDED
    time = datetime.fromisoformat(time) if isinstance(time, str) else time
    return f"{time.day} {time:%B %Y, %H:%M} UTC"


def describe_machine(record: RunRecord) -> str:
    """The number and names of the GPUs, or the number of CPU cores."""
    hardware = (record.manifest or {}).get("hardware")
    if not hardware or "gpus" not in hardware:
        return _NOT_RECORDED
    world_size = (record.manifest or {}).get("world_size")
    if not hardware["gpus"]:
        ranks = f", {world_size} ranks" if world_size and world_size > 1 else ""
        return f"CPU, {hardware.get('cpus', 'some')} cores{ranks}"
    names = Counter(gpu["name"] for gpu in hardware["gpus"])
    found = ", ".join(f"{count} {TIMES} {name}" for name, count in names.items())
    return f"{found}; {world_size} used" if world_size and world_size != len(hardware["gpus"]) else found


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
    if record.manifest is None or "recipe" not in record.manifest:
        return record.folder.parent.name
    recipe: str | None = record.manifest["recipe"]
    return recipe


def _facts(record: RunRecord, summary: Summary) -> list[tuple[str, str]]:
    status, config, plan, manifest = record.status, record.config or {}, record.plan or {}, record.manifest or {}
    model, peft = manifest.get("model") or {}, (config.get("peft") or {}).get("method")
    first_attempt = [*(manifest.get("earlier_attempts") or []), status][0]
    exit_code = status["exit_code"] if status else _NOT_RECORDED
    facts = [
        ("Recipe", recipe_of(record) or NO_RECIPE),
        ("Model", model and f"{model.get('name')}{' from random weights' if model.get('weights') == 'random' else ''}"),
        ("Hardware", describe_machine(record)),
        *_packages(manifest),
        (
            "Strategy",
            _joined((config.get("parallelism") or {}).get("strategy"), "full fine-tune" if peft == "full" else peft),
        ),
        ("Precision, attention, packing", _joined(*(plan.get(key) for key in ("precision", "attention", "packing")))),
        *_compiled(manifest),
        ("Optimizer steps", _steps(record, summary)),
        ("Tokens seen", format_count(summary.num_tokens) if summary.num_tokens else ""),
        ("Started", format_time(first_attempt.get("started"))),
        ("Took", describe_duration(summary)),
        ("Exit code", "none yet" if exit_code is None else str(exit_code)),
    ]
    return [(name, value or _NOT_RECORDED) for name, value in facts]


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _packages(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Whether the lock was installed, and what else was; empty for a run that did not compare them."""
    lock = (manifest.get("environment") or {}).get("lock")
    if lock is None:
        return []
    if lock["differences"] is None:
        return [("Packages", f"not compared with the lock: {lock['reason']}")]
    different = ", ".join(describe_differences(lock["differences"], _NUM_DIFFERENCES))
    return [("Packages", different or f"as in the {lock['name']} lock")]


def _compiled(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """What torch compiled during the training, which is part of its time; empty if nothing."""
    found = manifest.get(COMPILED_KEY)
    if found is None:
        return []
    graphs = f"{found['graphs']} graph{'s' if found['graphs'] > 1 else ''}"
    return [("Compiled", f"{graphs}, {found['after_first_step']} after the first step, in {found['seconds']:.1f} s")]


def _untitled(manifest: dict[str, Any]) -> str:
    """A title for a run without a recipe: the last parts of its model's and data's paths."""
    model = str((manifest.get("model") or {}).get("name") or "a model")
    sources = (manifest.get("dataset") or {}).get("records") or []
    names = [str(source.get("location") or source.get("name") or "") for source in sources]
    data = ", ".join(Path(name).name for name in names if name)
    model = Path(model).name if model.startswith(("/", "~")) else model
    return f"{model} on {data}" if data else model


def _steps(record: RunRecord, summary: Summary) -> str:
    if summary.num_steps is None:
        return "none logged"
    planned, status = summary.num_planned_steps, record.status
    steps = f"{summary.num_steps:,} of {planned:,}" if planned else str(summary.num_steps)
    if status.get("state") == "finished" and status.get("reason"):
        return f"{steps}; {status['reason']}"
    if (best := status.get("best_step")) is not None:
        return f"{steps}; model/ is checkpoint-{best}, the best by validation loss"
    return steps


def _figures(record: RunRecord, summary: Summary) -> list[Figure]:
    figures = [*_score_figure(record), *_loss_figures(record, summary)]
    if summary.tokens_per_second_per_gpu is not None:
        speed, per = format_value(summary.tokens_per_second_per_gpu), speed_unit([record])
        figures.append(Figure(label="tokens per second", value=speed, note=f"per {per}, median after warm-up"))
    if summary.mfu is not None:
        peak = next((line["peak_tflops"] for line in record.training if line.get("peak_tflops")), None)
        note = f"of a peak of {format_value(peak)} TFLOP/s" if peak else "of the peak"
        figures.append(Figure(label="MFU", value=format_value(summary.mfu, Unit.share), note=note))
    if summary.peak_memory_gib:
        note = "peak of the highest rank" if len(summary.peak_memory_gib) > 1 else "peak"
        figures.append(Figure(label="memory", value=format_value(max(summary.peak_memory_gib), Unit.gib), note=note))
    return figures


def _score_figure(record: RunRecord) -> list[Figure]:
    """The score of the first task, and the one before training."""
    tasks, before = ((evaluation or {}).get("tasks") or {} for evaluation in (record.after, record.before))
    for name, task in tasks.items():
        unit = unit_of(task)
        note = f"before training: {format_value(before[name]['value'], unit)}" if name in before else name
        return [Figure(label=task["metric"].replace("_", " "), value=format_value(task["value"], unit), note=note)]
    return []


def _loss_figures(record: RunRecord, summary: Summary) -> list[Figure]:
    figures = []
    if summary.final_loss is not None:
        note = f"from {format_value(summary.first_loss)}; mean of the last {summary.num_final_steps} logged"
        figures.append(Figure(label="training loss", value=format_value(summary.final_loss), note=note))
    best = record.status.get("best_step")
    of_best = [line["validation_loss"] for line in record.validation if best is not None and line["step"] == best]
    if of_best and of_best[-1] is not None:
        note = f"of model/, which is checkpoint-{best}"
        figures.append(Figure(label="validation loss", value=format_value(of_best[-1]), note=note))
    elif summary.best_validation_loss is not None:
        value, note = format_value(summary.best_validation_loss), f"best of {len(record.validation)}"
        figures.append(Figure(label="validation loss", value=value, note=note))
    return figures
