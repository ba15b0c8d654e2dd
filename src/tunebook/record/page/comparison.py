"""Several runs side by side: their numbers in one table, and the differences of their configurations."""

from __future__ import annotations

from collections.abc import Sequence

from tunebook.record.page.details import flatten
from tunebook.record.page.numbers import NO_VALUE, Unit, format_value
from tunebook.record.page.overview import Summary, describe_duration, describe_machine, speed_unit
from tunebook.record.run_record import RunRecord


def short_names(records: Sequence[RunRecord]) -> list[str]:
    """Unique names: the time if all runs are of one recipe, else recipe/time, else the path."""
    is_one_recipe = len({record.folder.parent for record in records}) == 1
    names = [record.folder.name if is_one_recipe else record.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.folder) for record in records]


def number_rows(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """The runs' numbers as rows of a name and a value per run, without rows that no run recorded."""
    rows = [
        ("Hardware", [describe_machine(record) for record in records]),
        ("Steps", [format_value(summary.num_steps, Unit.whole) for summary in summaries]),
        ("Tokens seen", [format_value(summary.num_tokens, Unit.whole) for summary in summaries]),
        ("Final training loss", [format_value(summary.final_loss) for summary in summaries]),
        ("Best validation loss", [format_value(summary.best_validation_loss) for summary in summaries]),
        (
            f"Tokens per second and {speed_unit(records)}",
            [format_value(summary.tokens_per_second_per_gpu) for summary in summaries],
        ),
        ("MFU", [format_value(summary.mfu, Unit.share) for summary in summaries]),
        ("Padding", [format_value(summary.padding_share, Unit.share) for summary in summaries]),
        ("Peak memory", [format_value(max(s.peak_memory_gib, default=None), Unit.gib) for s in summaries]),
        ("Duration", [NO_VALUE if s.seconds is None else describe_duration(s) for s in summaries]),
    ]
    return [(label, row) for label, row in rows if any(text != NO_VALUE for text in row)]


def config_differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Keys of run.yaml that differ between the runs that have one, with each run's value."""
    flat = [None if record.config is None else dict(flatten(record.config)) for record in records]
    keys = list(dict.fromkeys(key for config in flat if config is not None for key in config))
    rows = []
    for key in keys:
        values = [None if config is None else config.get(key, "not set") for config in flat]
        if len({value for value in values if value is not None}) > 1:
            rows.append((key, [NO_VALUE if value is None else value for value in values]))
    return rows
