"""The head of a run's report: what ran, how it ended, and the numbers it comes down to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tunebook.config.choices import Generation
from tunebook.record.locks import describe_differences
from tunebook.record.page.numbers import TIMES, Unit, format_count, format_duration, format_value
from tunebook.record.page.summary import Summary, main_score
from tunebook.record.run_record import RunRecord

_STATE_WORDS = {
    "finished": "finished",
    "stopped": "stopped on request",
    "failed": "failed",
    "invalid": "invalid",
    "running": "not ended",
    "unknown": "no manifest",
}

_NUM_DIFFERENCES = 4  # packages that the head names; the manifest below has all
NO_RECIPE = "none (own model and data)"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number in large type."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What stands above everything else."""

    title: str
    name: str
    state: str
    state_word: str
    banner: list[str]  # sentences; empty for a run that finished and whose numbers may be used
    facts: list[tuple[str, str]]
    figures: list[Figure]


def build_overview(record: RunRecord, summary: Summary) -> Overview:
    """Put the head of the report together from whatever was recorded."""
    state = state_of(record)
    return Overview(
        title=(record.config or {}).get("title") or recipe_of(record) or _untitled(record.manifest),
        name=record.name,
        state=state,
        state_word=_STATE_WORDS[state],
        banner=explain_state(record, summary),
        facts=_facts(record, summary),
        figures=_figures(record, summary),
    )


def state_of(record: RunRecord) -> str:
    """The state to show: what the manifest says, but never `finished` where a loss was not finite."""
    state = record.status.get("state", "unknown")
    return "invalid" if state == "finished" and record.first_invalid_step is not None else state


def state_word(record: RunRecord) -> str:
    """The state in words for people."""
    return _STATE_WORDS[state_of(record)]


def explain_state(record: RunRecord, summary: Summary) -> list[str]:
    """What a reader must know before using the numbers of a run that did not simply finish."""
    changed = [f"{name} was changed after the run: it has not the hash that the manifest notes, so its numbers may "
               "not be those that were measured." for name in record.changed_files]  # fmt: skip
    return [*changed, *_explain_end(record, summary)]


def _explain_end(record: RunRecord, summary: Summary) -> list[str]:
    state, status = state_of(record), record.status
    if state == "finished":
        return []
    reason = _sentence(status.get("reason"))
    until = f"after step {summary.num_steps}" if summary.num_steps else "before the first step was logged"
    checkpoint = status.get("last_checkpoint")
    saved = f"Last good checkpoint: {checkpoint}." if checkpoint else "No checkpoint of it is recorded."
    if state == "invalid":
        step = record.first_invalid_step
        where = f"The loss was not finite at step {step}." if step is not None else ""
        return [f"This training is invalid. {reason or where}", f"Do not use its numbers as a result. {saved}"]
    if state == "stopped":
        return [f"This run was stopped on request {until}, so it is not finished. {reason}",
                f"{saved} {_going_on(record)}"]  # fmt: skip
    if state == "failed":
        code = status.get("exit_code")
        return [f"This run failed {until} with exit code {code}. {reason}",
                f"What it recorded until then is below. {saved}"]  # fmt: skip
    if state == "running":
        when = f", at {format_time(record.last_logged)}" if record.last_logged else ""
        return [f"This run has not said how it ended: it is still running, or it was killed {until}{when}."]
    return ["This folder has no manifest.json: how the run ended, and what it was made of, is not recorded."]


def _going_on(record: RunRecord) -> str:
    """What starting a stopped run again does: a run without a checkpoint is taken up only where no step is left."""
    again = "Starting it again with training.resume=auto"
    if record.status.get("last_checkpoint"):
        return f"{again} goes on from there."
    if (record.folder / "model").is_dir():
        return f"Its model is trained to the end: {again[0].lower()}{again[1:]} does what is left."
    return "Starting it again begins anew, at the first step."


def speed_unit(records: Sequence[RunRecord]) -> str:
    """What the speed of these runs is of: each `GPU`, each `rank` of runs on a CPU, or either."""
    units = {"GPU" if _is_on_gpus(record) else "rank" for record in records}
    return " or ".join(sorted(units))


def _is_on_gpus(record: RunRecord) -> bool:
    """By its configuration, since a run on a CPU may be on a machine that has GPUs; else by what was found."""
    generation = ((record.config or {}).get("hardware") or {}).get("generation")
    if generation is not None:
        return bool(generation != Generation.cpu.name)
    return bool(((record.manifest or {}).get("hardware") or {}).get("gpus"))


def format_time(time: datetime | str | None) -> str:
    """A point in time for people: 21 November 2026, 07:18 UTC."""
    if time is None:
        return "not recorded"
    time = datetime.fromisoformat(time) if isinstance(time, str) else time
    return f"{time.day} {time:%B %Y, %H:%M} UTC"


def describe_machine(record: RunRecord) -> str:
    """The hardware in a few words: how many of which GPU, or the number of CPU cores."""
    hardware = (record.manifest or {}).get("hardware")
    if not hardware or "gpus" not in hardware:
        return "not recorded"
    world_size = (record.manifest or {}).get("world_size")
    if not hardware["gpus"]:
        ranks = f", {world_size} ranks" if world_size and world_size > 1 else ""
        return f"CPU, {hardware.get('cpus', 'some')} cores{ranks}"
    names = Counter(gpu["name"] for gpu in hardware["gpus"])
    found = ", ".join(f"{count} {TIMES} {name}" for name, count in names.items())
    return f"{found}; {world_size} used" if world_size and world_size != len(hardware["gpus"]) else found


def _facts(record: RunRecord, summary: Summary) -> list[tuple[str, str]]:
    status, manifest, plan = record.status, record.manifest or {}, record.plan or {}
    first_attempt = [*(manifest.get("earlier_attempts") or []), status][0]
    facts = [
        ("Recipe", recipe_of(record) or NO_RECIPE),
        ("Model", _describe_model(manifest)),
        ("Hardware", describe_machine(record)),
        *_packages(manifest),
        ("Strategy", _strategy(record.config)),
        (
            "Precision, attention, packing",
            ", ".join(str(plan[key]) for key in ("precision", "attention", "packing") if plan.get(key)),
        ),
        ("Optimizer steps", _steps(record, summary)),
        ("Tokens seen", format_count(summary.num_tokens) if summary.num_tokens else "not recorded"),
        ("Started", format_time(first_attempt.get("started"))),
        ("Took", describe_duration(summary)),
        ("Exit code", _exit_code(status)),
    ]
    return [(name, value or "not recorded") for name, value in facts]


def _packages(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Whether the lock was installed, and what else was; nothing of a run that did not compare them."""
    lock = (manifest.get("environment") or {}).get("lock")
    if lock is None:
        return []
    differences = lock["differences"]
    if differences is None:
        return [("Packages", f"not compared with the lock: {lock['reason']}")]
    told = ", ".join(describe_differences(differences, _NUM_DIFFERENCES))
    return [("Packages", told or f"as in the {lock['name']} lock")]


def recipe_of(record: RunRecord) -> str | None:
    """A run's recipe: of one without a manifest the folder that recipes' runs are in; None for one without a recipe."""
    if record.manifest is None or "recipe" not in record.manifest:
        return record.folder.parent.name
    recipe: str | None = record.manifest["recipe"]
    return recipe


def _untitled(manifest: dict[str, Any] | None) -> str:
    """A run without a recipe by its model and its data; the paths' last names say enough."""
    found = manifest or {}
    model = str((found.get("model") or {}).get("name") or "a model")
    sources = (found.get("dataset") or {}).get("records") or []
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


def _loss_of_the_best(record: RunRecord) -> float | None:
    """The validation loss of the checkpoint that was loaded at the end; None if none was, or it is of another run."""
    best = record.status.get("best_step")
    found = [line["validation_loss"] for line in record.validation if best is not None and line["step"] == best]
    return found[-1] if found else None


def describe_duration(summary: Summary) -> str:
    """The time of all attempts together: 1 min 16 s, 2 attempts."""
    if summary.seconds is None:
        return "not recorded"
    text = format_duration(summary.seconds)
    if summary.num_attempts > 1:
        text += f", {summary.num_attempts} attempts"
    if summary.num_attempts_without_end:
        text += f"; without the time of {summary.num_attempts_without_end} that did not say when it ended"
    return text


def _figures(record: RunRecord, summary: Summary) -> list[Figure]:
    figures = []
    after, before = main_score(record.after), main_score(record.before)
    if after:
        unit = Unit.share if 0 <= after[2] <= 1 else Unit.plain
        note = f"before training: {format_value(before[2], unit)}" if before and before[0] == after[0] else after[0]
        figures.append(Figure(label=after[1].replace("_", " "), value=format_value(after[2], unit), note=note))
    if summary.final_loss is not None:
        note = f"from {format_value(summary.first_loss)}; mean of the last {summary.num_final_steps} logged"
        figures.append(Figure(label="training loss", value=format_value(summary.final_loss), note=note))
    if (of_model := _loss_of_the_best(record)) is not None:
        note = f"of model/, which is checkpoint-{record.status['best_step']}"
        figures.append(Figure(label="validation loss", value=format_value(of_model), note=note))
    elif summary.best_validation_loss is not None:
        best = format_value(summary.best_validation_loss)
        figures.append(Figure(label="validation loss", value=best, note=f"best of {len(record.validation)}"))
    if summary.tokens_per_second_per_gpu is not None:
        speed = format_value(summary.tokens_per_second_per_gpu)
        figures.append(Figure(label="tokens per second", value=speed, note=_speed_note(record)))
    if summary.mfu is not None:
        peak = next((line["peak_tflops"] for line in record.training if line.get("peak_tflops")), None)
        note = f"of a peak of {format_value(peak)} TFLOP/s" if peak else "of the peak"
        figures.append(Figure(label="MFU", value=format_value(summary.mfu, Unit.share), note=note))
    if summary.peak_memory_gib:
        note = "peak of the highest rank" if len(summary.peak_memory_gib) > 1 else "peak"
        figures.append(Figure(label="memory", value=format_value(max(summary.peak_memory_gib), Unit.gib), note=note))
    return figures


def _exit_code(status: dict[str, Any]) -> str:
    if not status:
        return "not recorded"
    return "none yet" if status["exit_code"] is None else str(status["exit_code"])


def _speed_note(record: RunRecord) -> str:
    return f"per {speed_unit([record])}, median after warming up"


def _describe_model(manifest: dict[str, Any]) -> str:
    model = manifest.get("model")
    if not model:
        return ""
    weights = " from random weights" if model.get("weights") == "random" else ""
    return f"{model.get('name')}{weights}"


def _strategy(config: dict[str, Any] | None) -> str:
    strategy = ((config or {}).get("parallelism") or {}).get("strategy")
    peft = ((config or {}).get("peft") or {}).get("method")
    return ", ".join(str(part) for part in (strategy, "full fine-tune" if peft == "full" else peft) if part)


def _sentence(text: str | None) -> str:
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
