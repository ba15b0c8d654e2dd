"""The lower part of a run's report: the batch, what was decided and why, the data, memory by rank, the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tunebook.config.override_text import as_typed
from tunebook.record.page.numbers import NO_VALUE, TIMES, Unit, format_count, format_value
from tunebook.record.page.summary import Summary
from tunebook.record.run_record import RunRecord

_WIDTH, _HEIGHT, _BASE = 480, 150, 112  # SVG units; the bars stand on the base, labels below it
_NUM_LABELS = 6
_LEFT, _RIGHT, _TOP, _GAP = 14, 20, 18, 2


def draw_histogram(edges: Sequence[int], counts: Sequence[int]) -> Markup:
    """Bars between `edges` (one more than `counts`), in tokens; the tallest bar carries its count."""
    assert len(edges) == len(counts) + 1, "a histogram has one edge more than bars"
    width = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    tallest = max(counts)
    parts = [
        Markup('<line class="base" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(_LEFT, _WIDTH - _RIGHT, _BASE, _BASE)
    ]
    for index, count in enumerate(counts):
        height = (_BASE - _TOP) * count / tallest if tallest else 0
        bar = Markup(
            '<rect class="bar-fill" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        )
        what = f"{edges[index]:,} to {edges[index + 1]:,} tokens: {count:,} documents"
        parts.append(bar.format(_LEFT + index * width + _GAP / 2, _BASE - height, max(1.0, width - _GAP), height, what))
    peak = max(range(len(counts)), key=lambda index: counts[index])
    middle = Markup('<text class="x-tick" x="{:.1f}" y="{}">{}</text>')
    parts.append(middle.format(_LEFT + (peak + 0.5) * width, _TOP - 5, format_count(tallest)))
    every = max(1, -(-len(counts) // _NUM_LABELS))
    for index in range(0, len(edges), every):
        parts.append(middle.format(_LEFT + index * width, _BASE + 16, format_count(edges[index])))
    parts.append(
        Markup('<text class="axis-name end" x="{}" y="{}">tokens of a document</text>').format(_WIDTH - 4, _BASE + 34)
    )
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, f"Document lengths from {edges[0]:,} to {edges[-1]:,} tokens", Markup("").join(parts)
    )


_MAX_RANK_BARS = 16  # more are summed up


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """One rank's peak as a share of the longest bar."""

    name: str
    text: str
    share: float


@dataclass(frozen=True, kw_only=True)
class DataCount:
    """What became of one part of the data."""

    part: str
    counts: list[tuple[str, str]]
    histogram: Markup | None  # of the documents' lengths


def batch_facts(plan: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """The batch arithmetic as (number, what it is, how it comes about)."""
    batch = (plan or {}).get("batch")
    if not batch:
        return []
    unit = "GPUs" if (plan or {}).get("hardware", {}).get("generation") not in (None, "cpu") else "ranks"
    lines = []
    for key, name in (("documents_per_step", "documents per step"), ("rows_per_step", "rows per step"),
                      ("tokens_per_step", "tokens per step"), ("steps_per_epoch", "steps per epoch"),
                      ("total_steps", "steps in all")):  # fmt: skip
        if batch.get(key) is not None:
            lines.append((format_count(batch[key]), name, _how(key, batch, unit)))
    return lines


def choices(plan: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """What `auto` became: key, value, why."""
    return [(choice["key"], as_typed(choice["value"]), choice["why"]) for choice in (plan or {}).get("choices") or []]


def problems(plan: dict[str, Any] | None) -> list[dict[str, str]]:
    """What the plan warned of: key, message and fix."""
    named = ("key", "message", "fix")
    return [{name: str(problem[name]) for name in named} for problem in (plan or {}).get("problems") or []]


def data_counts(manifest: dict[str, Any] | None) -> list[DataCount]:
    """Documents, tokens and what was cut or dropped, for each part of the prepared data."""
    counts = ((manifest or {}).get("dataset") or {}).get("counts") or {}
    return [
        DataCount(part=part, counts=_count_lines(found), histogram=_histogram(found))
        for part, found in counts.items()
        if found
    ]


def data_sources(manifest: dict[str, Any] | None) -> list[str]:
    """Where the documents came from, one line for each source."""
    records = ((manifest or {}).get("dataset") or {}).get("records") or []
    lines = []
    for record in records:
        parts = [str(record["location"])]
        if record.get("revision"):
            parts.append(f"revision {record['revision']}")
        if record.get("format"):
            parts.append(str(record["format"]))
        if record.get("num_documents") is not None:
            parts.append(f"{format_count(record['num_documents'])} documents")
        lines.append(", ".join(parts))
    return lines


def memory_bars(record: RunRecord, summary: Summary) -> tuple[list[MemoryBar], str]:
    """The peak of every rank beside what was planned and what a GPU has, and a sentence on the scale."""
    plan = record.plan or {}
    parts = plan.get("memory_gib") or {}
    is_gpu = (plan.get("hardware") or {}).get("generation") != "cpu"
    planned = parts.get("allocated" if is_gpu else "total", parts.get("total"))  # as the peaks are recorded
    capacity = (plan.get("hardware") or {}).get("memory_gib")
    peaks = summary.peak_memory_gib
    if not peaks:
        return [], ""
    named = [(f"rank {rank}", peak) for rank, peak in enumerate(peaks)]
    if len(peaks) > _MAX_RANK_BARS:
        ordered = sorted(peaks)
        named = [("lowest rank", ordered[0]), ("middle", ordered[len(ordered) // 2]), ("highest rank", ordered[-1])]
    if planned is not None:
        named.append(("planned", planned))
    longest = capacity or max(value for _, value in named)
    bars = [
        MemoryBar(name=name, text=format_value(value, Unit.gib), share=min(1.0, value / longest if longest else 0.0))
        for name, value in named
    ]
    whose = "one GPU's" if is_gpu else "one rank's share of this machine's"
    note = f"The full width is {whose} {format_value(capacity, Unit.gib)}." if capacity else ""
    return bars, note


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested sections as (dotted key, value as text) lines, in their order."""
    if isinstance(value, dict) and value:
        start = f"{prefix}." if prefix else ""
        return [line for key, item in value.items() for line in flatten(item, f"{start}{key}")]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [line for index, item in enumerate(value) for line in flatten(item, f"{prefix}[{index}]")]
    if isinstance(value, list):
        return [(prefix, " ".join(map(str, value)) or NO_VALUE)]
    return [(prefix, NO_VALUE if value is None or value == {} else str(value))]


def _how(key: str, batch: dict[str, Any], unit: str) -> str:
    if key == "rows_per_step" and batch.get("accumulation"):
        counted = ((batch["world_size"], unit), (batch["accumulation"], "passes"), (batch["micro"], "rows in a pass"))
        factors = [f"{number} {_singular(name) if number == 1 else name}" for number, name in counted]
        return f" {TIMES} ".join(factors)
    if key == "documents_per_step":
        asked = f"{batch['global_samples']} asked for" if batch.get("global_samples") else ""
        return ", ".join(part for part in (asked, "several to a row" if batch.get("is_packed") else "") if part)
    if key == "tokens_per_step":
        return "estimated before the data was prepared" if batch.get("is_estimate") else _rows(batch)
    if key == "steps_per_epoch" and batch.get("num_documents"):
        return f"{format_count(batch['num_documents'])} documents"
    return ""


def _rows(batch: dict[str, Any]) -> str:
    if not batch.get("row_length"):
        return ""
    longest = f", and none has more than {batch['longest_row']:,}" if batch.get("longest_row") else ""
    return f"rows hold up to {batch['row_length']:,}{longest}"


def _singular(name: str) -> str:
    word, *rest = name.split(" ")
    return " ".join([{"GPUs": "GPU", "ranks": "rank", "passes": "pass", "rows": "row"}[word], *rest])


def _count_lines(counts: dict[str, Any]) -> list[tuple[str, str]]:
    names = (
        ("num_documents", "documents"), ("num_tokens", "tokens"), ("num_trained_tokens", "of them trained on"),
        ("shortest", "shortest document, tokens"), ("longest", "longest document, tokens"),
        ("num_cut", "documents cut to the maximum length"), ("num_tokens_lost", "tokens lost by that"),
        ("num_dropped", "documents dropped"),
    )  # fmt: skip
    lines = [(name, format_count(counts[key])) for key, name in names if counts.get(key) is not None]
    for title, section in (("dropped", "dropped"), ("note", "notes")):
        reasons = counts.get(section) or {}
        lines.extend((f"{title}: {reason}", format_count(count)) for reason, count in reasons.items() if count)
    return lines


def _histogram(counts: dict[str, Any]) -> Markup | None:
    lengths = counts.get("lengths")
    if not lengths or not lengths["counts"]:
        return None
    if len(lengths["edges"]) != len(lengths["counts"]) + 1:
        raise ValueError("dataset.counts: lengths.edges has not one more than lengths.counts")
    return draw_histogram(lengths["edges"], lengths["counts"])
