"""Results of a sweep's trials, read from their run folders, and the ranked table: in the terminal and in sweep.csv."""

from __future__ import annotations

import csv
import io
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from tunebook.errors import StoppedError
from tunebook.facts.methods import VALIDATION_METRICS
from tunebook.files import atomic_write_text, read_json
from tunebook.record.manifest import manifest_or_empty
from tunebook.record.metrics import is_training_line, median_after_warm_up, read_metrics
from tunebook.record.scores import mean_score

CSV_FILE = "sweep.csv"
# Attributes of a result that can rank it, the most informative first: heading and format in the table.
METRICS = {
    "evaluation_score": ("score", ".4g"),
    "validation_loss": ("validation loss", ".4f"),
    "final_loss": ("loss", ".4f"),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ",.0f"),
    "seconds": ("seconds", ",.0f"),
    **{name: (name.removeprefix("validation_").replace("_", " "), ".4g") for name in VALIDATION_METRICS},
}
# Metrics that a running trial reports, and their keys in the lines of metrics.jsonl.
LOGGED_WHILE_RUNNING = {"final_loss": "loss", "validation_loss": "validation_loss"}
_LONGEST_REASON = 120  # characters in a table
_MAX_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How the last turn of a trial ended, and its measurements; None if not measured or not finite."""

    exit_code: int
    how_it_ended: str
    seconds: float  # of all its turns
    final_loss: float | None  # of the last logged step
    validation_loss: float | None  # of the saved model: of the best checkpoint if that was loaded
    evaluation_score: float | None  # after training, mean over the tasks
    is_higher_better: bool  # of the evaluation score
    tokens_per_second_per_gpu: float | None  # median over the logged steps after warm-up
    was_pruned: bool = False
    method_metrics: dict[str, float | None] = field(default_factory=dict)  # validation of the saved model

    def value(self, metric: str) -> float | None:
        """One of `METRICS`; None if it was not measured."""
        found: float | None = self.method_metrics.get(metric) if metric in VALIDATION_METRICS else getattr(self, metric)
        return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial of the table."""

    number: int
    values: dict[str, str]  # of the keys that differ between trials
    result: TrialResult | None  # None: it has not ended

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"trial-{self.number:03d}"

    @property
    def exit_code(self) -> int:
        """Its exit code; that of a stopped run if it has not ended."""
        return self.result.exit_code if self.result is not None else StoppedError.exit_code


def read_result(
    run_folder: Path, log: Path, exit_code: int, *, seconds: float, ending: str | None, was_pruned: bool = False
) -> TrialResult:
    """Read one trial's result from its run folder and log, as recorded. `ending` is what only the sweep knows."""
    metrics = read_metrics(run_folder)
    training = [line for line in metrics if is_training_line(line)]
    speeds = [speed for line in training if (speed := line.get("tokens_per_second_per_gpu")) is not None]
    best = manifest_or_empty(run_folder).get("status", {}).get("best_step")
    validation = [line for line in metrics if not is_training_line(line) and best in (None, line["step"])]
    score, is_higher_better = _evaluation_score(run_folder)
    return TrialResult(
        exit_code=exit_code,
        how_it_ended=ending or _ending_of(run_folder, log, exit_code),
        seconds=seconds,
        final_loss=training[-1].get("loss") if training else None,
        validation_loss=validation[-1]["validation_loss"] if validation else None,
        method_metrics={
            name: validation[-1][name] for name in VALIDATION_METRICS if validation and name in validation[-1]
        },
        evaluation_score=score,
        is_higher_better=is_higher_better,
        tokens_per_second_per_gpu=median_after_warm_up(speeds),
        was_pruned=was_pruned,
    )


def _evaluation_score(run_folder: Path) -> tuple[float | None, bool]:
    file = run_folder / "evaluation" / "after.json"
    record = read_json(file) if file.is_file() else None
    # If some tasks failed, the mean over the others cannot be compared between trials.
    score = mean_score(record["tasks"]) if record is not None and not record.get("failed") else None
    return score or (None, True)


def _ending_of(run_folder: Path, log: Path, exit_code: int) -> str:
    """Return the run's state and, unless it reached its last step, the first line of the reason."""
    status = manifest_or_empty(run_folder).get("status", {})
    state, reason = "finished", ""
    if status.get("exit_code") == exit_code:
        state, reason = status["state"], status["reason"] or ""
    elif exit_code != 0:  # it ended before its run folder was made or resumed
        printed = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
        errors = [line for line in printed if line.startswith("error: ")]
        state, reason = "failed", (errors or printed or ["it printed nothing"])[-1]
    if exit_code == 0:
        return f"{state}: {reason.partition(';')[0]}" if reason else state
    start = textwrap.shorten(reason.strip().partition("\n")[0], _LONGEST_REASON, placeholder=" ...")
    return f"{state} (exit code {exit_code}): {start} (more in {log.name})"


def cost_of(result: TrialResult | None, metric: str) -> float | None:
    """Return the metric of a finished trial as a number that is lower for the better one; None if not measured."""
    value = result.value(metric) if result is not None and result.exit_code == 0 else None
    if value is None or result is None:
        return None
    is_higher_better = metric == "tokens_per_second_per_gpu"
    if metric == "evaluation_score":
        is_higher_better = result.is_higher_better
    if metric in VALIDATION_METRICS:
        is_higher_better = VALIDATION_METRICS[metric].is_higher_better
    return -value if is_higher_better else value


def ranked(rows: list[Row], metric: str) -> list[tuple[str, Row]]:
    """Return every trial with its rank, best first; then, with an empty rank, those without the metric."""
    with_cost = [(cost, row) for row in rows if (cost := cost_of(row.result, metric)) is not None]
    best_first = [row for _, row in sorted(with_cost, key=lambda pair: pair[0])]
    others = [row for row in rows if row not in best_first]
    return [*((str(rank), row) for rank, row in enumerate(best_first, 1)), *(("", row) for row in others)]


def sweep_exit_code(rows: list[Row]) -> int:
    """Return 0 if every trial finished or was pruned, else the exit code of the first that did not."""
    codes = [row.exit_code for row in rows if row.result is None or not row.result.was_pruned]
    return next((code for code in codes if code != 0), 0)


def write_csv(rows: list[Row], metric: str, fixed: list[str], folder: Path) -> None:
    """Write one line per trial, best first: rank, a column for each override (swept ones first), all measurements."""
    columns = ["rank", *rows[0].values, *(word.partition("=")[0] for word in fixed)]
    results = [row.result for row in rows if row.result is not None]
    method_metrics = [name for name in VALIDATION_METRICS if any(result.value(name) is not None for result in results)]
    measurements = [*(name for name in METRICS if name not in VALIDATION_METRICS), *method_metrics]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")  # None is an empty cell
    writer.writerow([*columns, "exit_code", "how_it_ended", *measurements, "run_folder"])
    for rank, row in ranked(rows, metric):
        values = [*row.values.values(), *(word.partition("=")[2] for word in fixed)]
        result = row.result
        ended = [getattr(result, name, None) for name in ("exit_code", "how_it_ended")]
        measured = [*ended, *(result.value(name) if result is not None else None for name in measurements)]
        writer.writerow([rank, *values, *measured, folder / row.name])
    atomic_write_text(folder / CSV_FILE, text.getvalue())


def sweep_table(rows: list[Row], metric: str) -> Table:
    """Return a table for a terminal: only swept keys, and only measurements that some trial has."""
    table = Table(title=f"Sweep, ranked by {metric.replace('_', ' ')}")
    table.add_column("rank", justify="right")
    for key in rows[0].values:
        table.add_column(key, justify="right", overflow="fold")
    results = [row.result for row in rows if row.result is not None]
    names = [name for name in METRICS if name == metric or name not in VALIDATION_METRICS]  # the file has them all
    shown = [name for name in names if any(result.value(name) is not None for result in results)]
    for name in shown:
        table.add_column(METRICS[name][0], justify="right")
    table.add_column("how it ended", overflow="fold")
    table.add_column("folder", overflow="fold")
    for rank, row in ranked(rows, metric):
        result = row.result
        cells = [_cell(result.value(name) if result is not None else None, METRICS[name][1]) for name in shown]
        ending = row.result.how_it_ended if row.result is not None else "not ended"
        table.add_row(*map(Text, (rank, *map(_shortened, row.values.values()), *cells, ending, row.name)))
    return table


def _shortened(value: str) -> str:
    """Shorten a number that Optuna proposed, which has 17 digits; the file has all of them."""
    try:
        return f"{float(value):.6g}" if len(value) > _MAX_DIGITS else value
    except ValueError:
        return value


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
