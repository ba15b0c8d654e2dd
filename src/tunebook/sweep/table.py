"""Output of a sweep's results: a table on the terminal and `sweep.csv`."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tunebook.files import atomic_write_text
from tunebook.sweep.results import Ranking, TrialResult
from tunebook.sweep.trials import Trial

if TYPE_CHECKING:
    from tunebook.sweep.space import Space

_MEASUREMENTS = ("exit_code", "how_it_ended", "final_loss", "validation_loss", "evaluation_score")
_MAX_DIGITS = 9
_COSTS = ("tokens_per_second_per_gpu", "seconds", "run_folder")


def write_csv(ranking: Ranking, file: Path) -> None:
    """Write one line per trial, best first: rank, a column for each override, and all measurements."""
    keys = _override_keys(ranking)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", *keys, *_MEASUREMENTS, *_COSTS])
    for rank, result in _lines(ranking):
        values = dict(override.split("=", 1) for override in result.trial.overrides)
        measured = [getattr(result, name) for name in (*_MEASUREMENTS, *_COSTS)]
        writer.writerow([rank, *(values[key] for key in keys), *("" if v is None else v for v in measured)])
    atomic_write_text(file, text.getvalue())


def sweep_table(ranking: Ranking) -> Table:
    """Return a table for a terminal: only swept keys, and only measurements that some trial has."""
    by = f"ranked by {ranking.measure}" if ranking.measure else "not ranked: no trial finished with a measurement"
    table = Table(title=f"Sweep, {by}")
    results = [result for _, result in _lines(ranking)]
    swept = list(results[0].trial.swept)
    table.add_column("rank", justify="right")
    for key in swept:
        table.add_column(key, justify="right", overflow="fold")
    shown = [column for column in _COLUMNS if any(getattr(result, column) is not None for result in results)]
    for column in shown:
        table.add_column(_COLUMNS[column][0], justify="right")
    table.add_column("how it ended", overflow="fold")
    table.add_column("folder", overflow="fold")
    for rank, result in _lines(ranking):
        cells = [_cell(getattr(result, column), _COLUMNS[column][1]) for column in shown]
        values = [_shortened(result.trial.swept[key]) for key in swept]
        row = (rank, *values, *cells, result.how_it_ended, result.run_folder.name)
        table.add_row(*map(Text, row))  # brackets of a list are not markup
    return table


def trial_table(trials: list[Trial], space: Space | None) -> Table:
    """Return a table of the trials of a list, or of what a search chooses from."""
    if space is not None:
        from tunebook.sweep.space import chosen_from

        table = Table("key", "chosen from", title="search")
        for key, distribution in space.items():
            table.add_row(Text(key), Text(chosen_from(distribution)))
        return table
    table = Table(title=f"{len(trials)} trials")
    table.add_column("trial", justify="right")
    for key in trials[0].swept:
        table.add_column(key, justify="right", overflow="fold")
    for trial in trials:
        table.add_row(*map(Text, (trial.name, *trial.swept.values())))
    return table


def best_line(recipe: str | None, best: TrialResult, recipes_dirs: list[Path]) -> str:
    """Return the command that trains the best trial again."""
    words = [*([recipe] if recipe else []), *best.trial.overrides]
    for folder in recipes_dirs:
        words += ["--recipes-dir", str(folder)]
    return f"best: {best.trial.name}, again: {shlex.join(['tunebook', 'train', *words])}"


# Attribute of a result -> heading, format.
_COLUMNS = {
    "evaluation_score": ("score", ".4g"),
    "validation_loss": ("validation loss", ".4f"),
    "final_loss": ("loss", ".4f"),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ",.0f"),
    "seconds": ("seconds", ",.0f"),
}


def _lines(ranking: Ranking) -> Iterator[tuple[str, TrialResult]]:
    for number, result in enumerate(ranking.ranked, 1):
        yield str(number), result
    for result in ranking.unranked:
        yield "", result


def _override_keys(ranking: Ranking) -> list[str]:
    """Return the key of every override, swept keys first."""
    first = next(result for _, result in _lines(ranking)).trial
    constant = [override.split("=", 1)[0] for override in first.overrides]
    return [*first.swept, *(key for key in constant if key not in first.swept)]


def _shortened(value: str) -> str:
    """Shorten a proposed number, which has 17 digits; the file has all of them."""
    if len(value) <= _MAX_DIGITS:
        return value
    with suppress(ValueError):
        return f"{float(value):.6g}"
    return value


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
