"""The few numbers a run comes down to, for the head of a report and for comparing runs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tunebook.record.metrics import median_after_warm_up
from tunebook.record.run_record import RunRecord

_FINAL_SHARE = 0.05  # of the logged steps, averaged for the final loss: one step alone is noise


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers; None where it was not recorded."""

    num_steps: int | None
    num_planned_steps: int | None
    num_tokens: int | None
    first_loss: float | None
    final_loss: float | None
    num_final_steps: int  # that the final loss is the mean of
    best_validation_loss: float | None
    tokens_per_second_per_gpu: float | None  # median after warming up
    mfu: float | None
    padding_share: float | None
    peak_memory_gib: list[float]  # by rank
    seconds: float | None  # of all attempts that said when they ended, the last one among them
    num_attempts: int  # with those that were stopped, failed or killed before
    num_attempts_without_end: int  # of those before


def summarise(record: RunRecord) -> Summary:
    """Work the numbers out from what was logged."""
    losses = record.values("loss")
    num_final = max(1, round(_FINAL_SHARE * len(losses)))
    earlier = [attempt.get("seconds") for attempt in (record.manifest or {}).get("earlier_attempts") or []]
    validation = [line["validation_loss"] for line in record.validation if line["validation_loss"] is not None]
    return Summary(
        num_steps=record.training[-1]["step"] if record.training else None,
        num_planned_steps=record.plan["batch"].get("total_steps") if record.plan and "batch" in record.plan else None,
        num_tokens=record.training[-1].get("tokens_seen") if record.training else None,
        first_loss=losses[0] if losses else None,
        final_loss=fmean(losses[-num_final:]) if losses else None,
        num_final_steps=num_final,
        best_validation_loss=min(validation, default=None),
        tokens_per_second_per_gpu=median_after_warm_up(record.values("tokens_per_second_per_gpu")),
        mfu=median_after_warm_up(record.values("mfu")),
        padding_share=_padding_share(record.training),
        peak_memory_gib=_peaks([line["memory_gib"] for line in record.training if line.get("memory_gib")]),
        seconds=_sum_of_attempts(record.status.get("seconds"), earlier),
        num_attempts=1 + len(earlier),
        num_attempts_without_end=earlier.count(None),
    )


def _sum_of_attempts(last: float | None, earlier: list[float | None]) -> float | None:
    """None of a run that has not ended, however long it was at work before."""
    return None if last is None else round(last + sum(seconds for seconds in earlier if seconds is not None), 1)


def main_score(evaluation: dict[str, Any] | None) -> tuple[str, str, float] | None:
    """The first task of an evaluation: its name, its metric and its value."""
    if not evaluation or not evaluation["tasks"]:
        return None
    name, task = next(iter(evaluation["tasks"].items()))
    return name, task["metric"], task["value"]


def _padding_share(lines: list[dict[str, Any]]) -> float | None:
    """Of all tokens that were computed: each line's share counts for those computed since the line before."""
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


def _peaks(lines: list[list[float | None]]) -> list[float]:
    num_ranks = max(map(len, lines), default=0)
    return [max((line[rank] or 0.0 for line in lines if rank < len(line)), default=0.0) for rank in range(num_ranks)]
