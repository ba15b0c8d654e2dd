"""The lower part of a run's report: batch, choices and reasons, data, memory by rank, start-up, manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tunebook.config.choices import Weights
from tunebook.config.override_text import as_typed
from tunebook.record.page.numbers import NO_VALUE, TIMES, Unit, format_count, format_value
from tunebook.record.page.overview import Summary, is_on_gpus, speed_unit
from tunebook.record.run_record import RunRecord

_WIDTH, _HEIGHT, _BASE = 480, 150, 112  # SVG units; the bars stand on the base, the labels are below it
_LEFT, _RIGHT, _TOP, _GAP = 14, 20, 18, 2
_NUM_LABELS = 6
_MAX_RANK_BARS = 16  # more ranks are summarized
_SINGULAR = {"GPUs": "GPU", "ranks": "rank", "groups": "group", "passes": "pass", "rows in a pass": "row in a pass"}
_BATCH_ROWS = (
    ("documents_per_step", "documents per step"), ("rows_per_step", "rows per step"),
    ("tokens_per_step", "tokens per step"), ("steps_per_epoch", "steps per epoch"), ("total_steps", "steps in all"),
)  # fmt: skip
_COUNT_ROWS = (
    ("num_documents", "documents"), ("num_tokens", "tokens"), ("num_trained_tokens", "of them trained on"),
    ("shortest", "shortest document, tokens"), ("longest", "longest document, tokens"),
    ("num_cut", "documents cut to the maximum length"), ("num_answers_cut", "of them ending within an answer"),
    ("num_tokens_lost", "tokens lost by that"), ("num_dropped", "documents dropped"),
)  # fmt: skip
_START_PHASES = {
    "launcher": {
        "start_python": "Python and Tunebook",
        "plan": "composed, checked, planned",
        "checks": "launcher, model and preflight checks",
        "data": "data prepared, or found prepared",
        "run_folder": "batch solved, records started",
        "contamination": "evaluation items looked for in the training data",
        "evaluation_before": "evaluation before training",
    },
    "rank": {
        "launch": "from the launcher to the rank",
        "start_python": "Python",
        "import_torch": "torch imported",  # of runs before the libraries were imported in one phase
        "import_libraries": "libraries imported",
        "data": "data opened, batches assigned",
        "model": "model built",
        "join_ranks": "GPU and process group",
        "weights": "weights read, or copied from rank 0",
        "trainer": "trainer built",
        "wrap": "model wrapped, checkpoint read",
        "checks": "parallelism check, leak probe",
        "first_step": "first optimizer step",
    },
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A labelled stretch of a horizontal bar, as shares of its full width."""

    name: str
    text: str
    share: float = 0.0
    begins: float = 0.0
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class DataCount:
    """The counts of one part of the data."""

    part: str
    counts: list[tuple[str, str]]
    histogram: Markup | None  # of the documents' lengths


def draw_histogram(edges: Sequence[int], counts: Sequence[int]) -> Markup:
    """Bars between `edges` (one more than `counts`), in tokens. The tallest bar is labelled with its count."""
    assert len(edges) == len(counts) + 1, "a histogram has one edge more than bars"
    width, tallest = (_WIDTH - _LEFT - _RIGHT) / len(counts), max(counts)
    base = Markup('<line class="base" x1="{}" x2="{}" y1="{}" y2="{}"/>')
    bar = Markup('<rect class="bar-fill" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>')
    label = Markup('<text class="x-tick" x="{:.1f}" y="{}">{}</text>')
    parts = [base.format(_LEFT, _WIDTH - _RIGHT, _BASE, _BASE)]
    for index, count in enumerate(counts):
        height = (_BASE - _TOP) * count / tallest if tallest else 0
        title = f"{edges[index]:,} to {edges[index + 1]:,} tokens: {count:,} documents"
        left = _LEFT + index * width + _GAP / 2
        parts.append(bar.format(left, _BASE - height, max(1.0, width - _GAP), height, title))
    parts.append(label.format(_LEFT + (counts.index(tallest) + 0.5) * width, _TOP - 5, format_count(tallest)))
    for index in range(0, len(edges), max(1, -(-len(counts) // _NUM_LABELS))):
        parts.append(label.format(_LEFT + index * width, _BASE + 16, format_count(edges[index])))
    axis_name = Markup('<text class="axis-name end" x="{}" y="{}">tokens of a document</text>')
    parts.append(axis_name.format(_WIDTH - 4, _BASE + 34))
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, f"Document lengths from {edges[0]:,} to {edges[-1]:,} tokens", Markup("").join(parts)
    )


def batch_facts(record: RunRecord) -> list[tuple[str, str, str]]:
    """The batch arithmetic as (number, name, derivation)."""
    batch, unit = (record.plan or {}).get("batch") or {}, f"{speed_unit([record])}s"
    return [
        (format_count(batch[key]), name, _derivation(key, batch, unit))
        for key, name in _BATCH_ROWS
        if batch.get(key) is not None
    ]


def _derivation(key: str, batch: dict[str, Any], unit: str) -> str:
    if key == "rows_per_step" and batch.get("accumulation"):
        group = batch.get("sequence_group_size", 1)  # absent from older plans
        counted = (
            (batch["world_size"] // group, unit if group == 1 else "groups"),
            (batch["accumulation"], "passes"),
            (batch["micro"], "rows in a pass"),
        )
        text = f" {TIMES} ".join(f"{number} {_SINGULAR[name] if number == 1 else name}" for number, name in counted)
        return text if group == 1 else f"{text}; a group of {group} {unit} shares each row"
    if key == "documents_per_step":
        asked = f"{batch['global_samples']} asked for" if batch.get("global_samples") else ""
        return ", ".join(part for part in (asked, "several to a row" if batch.get("is_packed") else "") if part)
    if key == "tokens_per_step" and batch.get("is_estimate"):
        return "estimated before the data was prepared"
    if key == "tokens_per_step" and batch.get("row_length"):
        longest = f", and none has more than {batch['longest_row']:,}" if batch.get("longest_row") else ""
        return f"rows hold up to {batch['row_length']:,}{longest}"
    if key == "steps_per_epoch" and batch.get("num_documents"):
        return f"{format_count(batch['num_documents'])} documents"
    return ""


def choices(plan: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """The resolved `auto` settings: key, value, why."""
    return [(choice["key"], as_typed(choice["value"]), choice["why"]) for choice in (plan or {}).get("choices") or []]


def problems(plan: dict[str, Any] | None) -> list[dict[str, str]]:
    """The plan's warnings: key, message and fix."""
    named = ("key", "message", "fix")
    return [{name: str(problem[name]) for name in named} for problem in (plan or {}).get("problems") or []]


def data_counts(manifest: dict[str, Any] | None) -> list[DataCount]:
    """Documents, tokens, and what was cut or dropped, for each part of the prepared data."""
    counts = ((manifest or {}).get("dataset") or {}).get("counts") or {}
    return [
        DataCount(part=part, counts=_count_lines(found), histogram=_histogram(found))
        for part, found in counts.items()
        if found
    ]


def _count_lines(counts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [(name, format_count(counts[key])) for key, name in _COUNT_ROWS if counts.get(key) is not None]
    for title, section in (
        ("documents", "contents"),
        ("left out", "skipped"),
        ("dropped", "dropped"),
        ("note", "notes"),
    ):
        reasons = counts.get(section) or {}
        lines.extend((f"{title}: {reason}", format_count(count)) for reason, count in reasons.items() if count)
    return lines


def _histogram(counts: dict[str, Any]) -> Markup | None:
    lengths = counts.get("lengths")
    if not lengths or not lengths["counts"]:
        return None
    if len(lengths["edges"]) != len(lengths["counts"]) + 1:
        raise ValueError("dataset.counts: lengths.edges does not have one entry more than lengths.counts")
    return draw_histogram(lengths["edges"], lengths["counts"])


def data_sources(manifest: dict[str, Any] | None) -> list[str]:
    """The origin of the documents, one line per source."""
    lines = []
    for record in ((manifest or {}).get("dataset") or {}).get("records") or []:
        revision, number = record.get("revision"), record.get("num_documents")
        parts = [
            str(record["location"]),
            f"revision {revision}" if revision else "",
            str(record.get("format") or ""),
            f"{format_count(number)} documents" if number is not None else "",
        ]
        lines.append(", ".join(filter(None, parts)))
    return lines


def memory_bars(record: RunRecord, summary: Summary) -> tuple[list[Bar], str]:
    """The peak of every rank, the planned memory, and a sentence on the scale."""
    plan, peaks = record.plan or {}, summary.peak_memory_gib
    if not peaks:
        return [], ""
    hardware, parts = plan.get("hardware") or {}, plan.get("memory_gib") or {}
    is_gpu, capacity = is_on_gpus(record), hardware.get("memory_gib")
    planned = parts.get("allocated" if is_gpu else "total", parts.get("total"))  # as the peaks are recorded
    named = [(f"rank {rank}", peak) for rank, peak in enumerate(peaks)]
    if len(peaks) > _MAX_RANK_BARS:
        ordered = sorted(peaks)
        named = [("lowest rank", ordered[0]), ("middle", ordered[len(ordered) // 2]), ("highest rank", ordered[-1])]
    if planned is not None:
        named.append(("planned", planned))
    longest = capacity or max(value for _, value in named)
    bars = [
        Bar(name=name, text=format_value(value, Unit.gib), share=min(1.0, value / longest if longest else 0.0))
        for name, value in named
    ]
    whose = "one GPU's" if is_gpu else "one rank's share of this machine's"
    return bars, f"The full width is {whose} {format_value(capacity, Unit.gib)}." if capacity else ""


def start_bars(manifest: dict[str, Any] | None) -> tuple[list[Bar], str]:
    """The phases to the first optimizer step, and a sentence on their sum; none if that step was not reached."""
    found = (manifest or {}).get("start_up") or {}
    total = found.get("first_step_s")
    if not total:
        return [], ""
    is_random = ((manifest or {}).get("model") or {}).get("weights") == Weights.random.name
    bars: list[Bar] = []
    begins = 0.0
    for kind, names in _START_PHASES.items():
        for phase, seconds in found[kind].items():
            name = names.get(phase, phase.replace("_", " "))
            name += ", random weights drawn" if is_random and phase == "model" else ""
            text, share = format_value(seconds, Unit.seconds), min(1.0, seconds / total)
            bars.append(Bar(name=name, text=text, begins=min(1.0, begins / total), share=share, kind=kind))
            begins += seconds
    return bars, f"{format_value(total, Unit.seconds)} from the command to the end of the first optimizer step."


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested sections as (dotted key, value as text), in their order."""
    if isinstance(value, dict) and value:
        start = f"{prefix}." if prefix else ""
        return [line for key, item in value.items() for line in flatten(item, f"{start}{key}")]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [line for index, item in enumerate(value) for line in flatten(item, f"{prefix}[{index}]")]
    if isinstance(value, list):
        return [(prefix, " ".join(map(str, value)) or NO_VALUE)]
    return [(prefix, NO_VALUE if value is None or value == {} else str(value))]
