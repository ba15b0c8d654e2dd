"""`tunebook diff RUN RUN`: what is not the same in two runs' records, what they were asked, and what came out."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from tunebook.config.identity import flat_differences
from tunebook.evidence.tolerances import relative
from tunebook.record.page.comparison import config_differences
from tunebook.record.page.summary import Summary, summarise
from tunebook.record.run_record import RunRecord

NOT_SET = "not set"
# Of every run its own, with all below them, and so no difference worth a line.
_EVERY_RUNS_OWN = tuple(f"{key}." for key in (
    "status.started", "status.ended", "status.seconds", "command", "typed", "config_sha256", "leak_probe.probe_s",
    "leak_probe.warm_up_s", "start_up", "files_sha256", "model_files.training_args.bin",  # which names the run folder
))  # fmt: skip
_NUMBERS = (
    "num_steps", "num_tokens", "first_loss", "final_loss", "best_validation_loss", "tokens_per_second_per_gpu", "mfu",
    "padding_share", "seconds", "num_attempts",
)  # fmt: skip


def differences(one: RunRecord, other: RunRecord) -> dict[str, list[tuple[str, Any, Any]]]:
    """Keys with both values that differ: of the `config`, of the `manifest`, and of what was measured, `results`."""
    return {
        "config": [(key, values[0], values[1]) for key, values in config_differences([one, other])],
        "manifest": _manifest_differences(one.manifest or {}, other.manifest or {}),
        "results": _result_differences(one, other),
    }


def _manifest_differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    found = flat_differences(one, other, absent=lambda key: NOT_SET)
    return [difference for difference in found if not f"{difference[0]}.".startswith(_EVERY_RUNS_OWN)]


def _result_differences(one: RunRecord, other: RunRecord) -> list[tuple[str, Any, Any]]:
    first, second = summarise(one), summarise(other)
    rows = [(name, getattr(first, name), getattr(second, name)) for name in _NUMBERS]
    rows.append(("peak_memory_gib", _peak(first), _peak(second)))
    found = [row for row in rows if row[1] != row[2]]
    step = first_different_step(one, other)
    if step is not None:
        first_losses, second_losses = dict(one.scheduled_losses()), dict(other.scheduled_losses())
        at_step = (first_losses.get(step, NOT_SET), second_losses.get(step, NOT_SET))
        found.insert(0, (f"loss at step {step}, the first that differs", *at_step))
        found.insert(1, ("largest difference of a step's loss, relative", "", largest_difference(one, other)))
    return found


def first_different_step(one: RunRecord, other: RunRecord) -> int | None:
    """The first optimizer step whose logged loss is not the same in every bit; None where all are."""
    first, second = dict(one.scheduled_losses()), dict(other.scheduled_losses())
    return next(
        (int(step) for step in sorted(first.keys() | second.keys()) if first.get(step) != second.get(step)), None
    )


def largest_difference(one: RunRecord, other: RunRecord) -> float | None:
    """Over the steps that both have; None where they share none."""
    first, second = dict(one.scheduled_losses()), dict(other.scheduled_losses())
    apart = [
        relative(second[step] or 0.0, loss)
        for step, loss in first.items()
        if loss is not None and second.get(step) is not None
    ]
    return max(apart, default=None)


def _peak(summary: Summary) -> float | None:
    return max(summary.peak_memory_gib, default=None)


def difference_table(found: dict[str, list[tuple[str, Any, Any]]], names: tuple[str, str]) -> Table:
    """For a terminal; a hash is shortened, since nobody reads all of it."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "key", *names):
        table.add_column(Text(heading), overflow="fold")
    for section, rows in found.items():
        for index, (key, one, other) in enumerate(rows):
            cells = (section if index == 0 else "", key, _short(one), _short(other))
            table.add_row(*map(Text, cells))  # values may hold brackets
    return table


def _short(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    is_hash = len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
    return f"{text[:12]}..." if is_hash else text
