"""Results of a sweep's trials, read from their run folders, their ranking, and its tables: terminal and `sweep.csv`."""

from __future__ import annotations

import csv
import io
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from tunebook.config.override_text import command_words, shell_command
from tunebook.files import atomic_write_text, read_json
from tunebook.record.differences import mean_score
from tunebook.record.manifest import MANIFEST_FILE, manifest_or_empty
from tunebook.record.metrics import is_training_line, median_after_warm_up, read_metrics
from tunebook.sweep.trial_process import EXIT_STOPPED, TrialEnd
from tunebook.sweep.trials import Trial

if TYPE_CHECKING:
    from tunebook.sweep.space import Space


_MEANINGS = {2: "the request is wrong", 3: "it does not fit", 4: "the data is wrong", EXIT_STOPPED: "it was stopped"}
# Measures that rank trials if no metric was chosen, the most informative first.
_LONGEST_REASON = 120  # characters in a table
_MEASURES = ("evaluation_score", "validation_loss", "final_loss")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One trial and its results; None if not measured."""

    trial: Trial
    run_folder: Path
    exit_code: int | None  # None: never started
    how_it_ended: str  # a run's state, with the reason unless it reached its last step
    final_loss: float | None  # of the last logged step
    validation_loss: float | None  # of the saved model: of the best checkpoint if that was loaded
    evaluation_score: float | None  # after training, mean over the tasks
    is_higher_better: bool  # of the evaluation score
    tokens_per_second_per_gpu: float | None  # median over the logged steps after warm-up
    seconds: float | None
    was_pruned: bool = False

    @property
    def has_finished(self) -> bool:
        """Whether it is ranked."""
        return self.exit_code == 0


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The finished trials, best first, then the others, and the measure."""

    measure: str | None  # None: no measure that all finished trials have
    ranked: list[TrialResult]
    unranked: list[TrialResult]

    @property
    def lines(self) -> list[tuple[str, TrialResult]]:
        """Every trial with its rank, which is empty for those that are not ranked."""
        return [*((str(rank), one) for rank, one in enumerate(self.ranked, 1)), *(("", one) for one in self.unranked)]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The metric of a search, or the metric that ranks a list."""

    metric: str  # a key of options.METRICS
    direction: str  # of options.DIRECTIONS

    def value_of(self, result: TrialResult) -> float | None:
        """Return a trial's metric; None if it was not measured, is not finite, or the trial did not finish."""
        value: float | None = getattr(result, self.metric) if result.has_finished else None
        return value


def read_result(trial: Trial, run_folder: Path, end: TrialEnd | None) -> TrialResult:
    """Read one trial's result from its folder, as far as recorded."""
    status = manifest_or_empty(run_folder).get("status")
    exit_code, how_it_ended = _ending(end, status, run_folder.name)
    metrics = read_metrics(run_folder)
    training = [line for line in metrics if is_training_line(line)]
    validation = [line for line in metrics if not is_training_line(line)]
    score, is_higher_better = _evaluation_score(run_folder)
    speeds = [
        line["tokens_per_second_per_gpu"] for line in training if line.get("tokens_per_second_per_gpu") is not None
    ]
    return TrialResult(
        trial=trial,
        run_folder=run_folder,
        exit_code=exit_code,
        how_it_ended=how_it_ended,
        final_loss=training[-1].get("loss") if training else None,
        validation_loss=_validation_loss(validation, status),
        evaluation_score=score,
        is_higher_better=is_higher_better,
        tokens_per_second_per_gpu=median_after_warm_up(speeds),
        seconds=None if end is None else end.seconds,
        was_pruned=end is not None and end.was_pruned,
    )


def rank(results: list[TrialResult], goal: Goal | None = None) -> Ranking:
    """Rank the trials by the goal.

    Without a goal, rank by the first measure that every finished trial has; further such measures break ties.
    """
    finished = [result for result in results if result.has_finished]
    measures = [name for name in _MEASURES if all(getattr(result, name) is not None for result in finished)]
    if goal is not None:
        measures = [goal.metric]

    def is_ranked(result: TrialResult) -> bool:
        return result.has_finished and bool(measures) and getattr(result, measures[0]) is not None

    ranked = sorted(filter(is_ranked, results), key=lambda result: [_sort_key(result, name, goal) for name in measures])
    unranked = sorted(filterfalse(is_ranked, results), key=lambda result: not result.has_finished)
    return Ranking(measure=measures[0].replace("_", " ") if ranked else None, ranked=ranked, unranked=unranked)


def sweep_exit_code(results: list[TrialResult]) -> int:
    """Return 0 if every trial finished or was pruned, else the code of the first that did not; 6 if never started."""
    left = [result for result in results if not result.was_pruned]
    codes = [EXIT_STOPPED if result.exit_code is None else result.exit_code for result in left]
    return next((code for code in codes if code != 0), 0)


def _sort_key(result: TrialResult, measure: str, goal: Goal | None) -> float:
    """Return a number that is smaller for the better trial."""
    value: float = getattr(result, measure)
    if goal is not None:
        return -value if goal.direction == "maximize" else value
    return -value if measure == "evaluation_score" and result.is_higher_better else value


def _ending(end: TrialEnd | None, status: dict[str, Any] | None, name: str) -> tuple[int | None, str]:
    """Return the exit code and one line of text."""
    if end is None:
        return None, "not started: the sweep was stopped"
    if end.exit_code == 0:
        early = status["reason"] if status is not None else None
        return 0, f"finished: {early.partition(';')[0]}" if early else "finished"
    if end.was_pruned:
        return end.exit_code, f"pruned: {end.reason}"
    if end.was_interrupted:
        return end.exit_code, "stopped with the sweep"
    if end.reason is not None:
        return end.exit_code, f"failed: {_shortened_reason(end.reason, f'{name}.json')}"
    if status is None or status["reason"] is None or status["exit_code"] != end.exit_code:
        # It failed before its run folder was made or resumed, or was killed; its output says more.
        meaning = _MEANINGS.get(end.exit_code, "it ended unexpectedly")
        return end.exit_code, f"failed: {meaning} (exit code {end.exit_code}), see what it printed"
    return end.exit_code, f"{status['state']}: {_shortened_reason(status['reason'], f'{name}/{MANIFEST_FILE}')}"


def _shortened_reason(reason: str, file: str) -> str:
    """Return the first line of a reason, or the start of a long one, and the file with the rest."""
    start = textwrap.shorten(reason.strip().partition("\n")[0], _LONGEST_REASON, placeholder="")
    return start if start == " ".join(reason.split()) else f"{start} ... (the rest is in {file})"


def _validation_loss(lines: list[dict[str, Any]], status: dict[str, Any] | None) -> float | None:
    """Return the loss of the saved model: after the last step, or of the best checkpoint if that was loaded."""
    best = (status or {}).get("best_step")
    losses = [line["validation_loss"] for line in lines if best is None or line["step"] == best]
    return losses[-1] if losses else None


def _evaluation_score(run_folder: Path) -> tuple[float | None, bool]:
    file = run_folder / "evaluation" / "after.json"
    record = read_json(file) if file.is_file() else None
    # If some tasks failed, the mean over the others cannot be compared between trials.
    found = mean_score(record["tasks"]) if record is not None and not record.get("failed") else None
    return (None, True) if found is None else found


_MEASUREMENTS = (
    "exit_code", "how_it_ended", "final_loss", "validation_loss", "evaluation_score", "tokens_per_second_per_gpu",
    "seconds", "run_folder",
)  # fmt: skip
_MAX_DIGITS = 9


def write_csv(ranking: Ranking, file: Path) -> None:
    """Write one line per trial, best first: rank, a column for each override (swept ones first), all measurements."""
    text = io.StringIO()
    rows = [
        {"rank": rank}
        | result.trial.swept
        | dict(override.split("=", 1) for override in result.trial.overrides)
        | {name: getattr(result, name) for name in _MEASUREMENTS}
        for rank, result in ranking.lines
    ]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")  # None is an empty cell
    writer.writeheader()
    writer.writerows(rows)
    atomic_write_text(file, text.getvalue())


def sweep_table(ranking: Ranking) -> Table:
    """Return a table for a terminal: only swept keys, and only measurements that some trial has."""
    by = f"ranked by {ranking.measure}" if ranking.measure else "not ranked: no trial finished with a measurement"
    table = Table(title=f"Sweep, {by}")
    results = [result for _, result in ranking.lines]
    swept = list(results[0].trial.swept)
    table.add_column("rank", justify="right")
    for key in swept:
        table.add_column(key, justify="right", overflow="fold")
    shown = [column for column in _COLUMNS if any(getattr(result, column) is not None for result in results)]
    for column in shown:
        table.add_column(_COLUMNS[column][0], justify="right")
    table.add_column("how it ended", overflow="fold")
    table.add_column("folder", overflow="fold")
    for rank, result in ranking.lines:
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
    again = shell_command(command_words("train", recipe, best.trial.overrides, recipes_dirs))
    return f"best: {best.trial.name}, again: {again}"


# Attribute of a result -> heading, format.
_COLUMNS = {
    "evaluation_score": ("score", ".4g"),
    "validation_loss": ("validation loss", ".4f"),
    "final_loss": ("loss", ".4f"),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ",.0f"),
    "seconds": ("seconds", ",.0f"),
}


def _shortened(value: str) -> str:
    """Shorten a proposed number, which has 17 digits; the file has all of them."""
    if len(value) <= _MAX_DIGITS:
        return value
    with suppress(ValueError):
        return f"{float(value):.6g}"
    return value


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
