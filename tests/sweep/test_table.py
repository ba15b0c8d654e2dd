from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.sweep.table import (
    Row,
    TrialResult,
    cost_of,
    ranked,
    read_result,
    sweep_exit_code,
    sweep_table,
    write_csv,
)

MakeResult = Callable[..., TrialResult]


@pytest.fixture
def result_of(tmp_path: Path) -> MakeResult:
    """Write what one trial left and read it back."""

    def make(
        *,
        exit_code: int = 0,
        losses: tuple[float | None, ...] = (),
        speeds: tuple[float | None, ...] = (),
        validation: tuple[tuple[int, float], ...] = (),
        printed: str = "",
        is_recorded: bool = True,
        **status: Any,
    ) -> TrialResult:
        folder = tmp_path / "trial-000"
        folder.mkdir()
        lines: list[dict[str, Any]] = [
            {"step": step, "loss": loss, "tokens_per_second_per_gpu": speed}
            for step, (loss, speed) in enumerate(zip(losses, speeds or [None] * len(losses), strict=True), 1)
        ]
        lines += [{"step": step, "validation_loss": loss} for step, loss in validation]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = {"state": "finished", "exit_code": exit_code if is_recorded else None, "reason": None} | status
        (folder / "manifest.json").write_text(json.dumps({"format": 1, "status": status}))
        log = tmp_path / "trial-000.log"
        log.write_text(printed)
        return read_result(folder, log, exit_code, seconds=1.5, ending=None)

    return make


def rows(*results: TrialResult | None) -> list[Row]:
    return [Row(number=number, values={"a": str(number)}, result=result) for number, result in enumerate(results)]


def result(exit_code: int = 0, loss: float | None = None, **values: Any) -> TrialResult:
    known: dict[str, Any] = {
        "how_it_ended": "finished" if exit_code == 0 else 'failed: a "bad", line',
        "seconds": 1.5,
        "validation_loss": None,
        "evaluation_score": None,
        "is_higher_better": True,
        "tokens_per_second_per_gpu": None,
    }
    return TrialResult(exit_code=exit_code, final_loss=loss, **known | values)


def test_a_finished_trial_is_read_from_its_folder(result_of: MakeResult, tmp_path: Path) -> None:
    trial = result_of(losses=(4.0, 3.0, 2.0, 1.0), speeds=(10.0, 400.0, 300.0, 200.0), validation=((2, 9.0), (4, 2.5)))
    assert (trial.final_loss, trial.validation_loss, trial.evaluation_score) == (1.0, 2.5, None)
    assert trial.tokens_per_second_per_gpu == 300.0  # of the last three; 250 with the first, which is warming up
    assert (trial.exit_code, trial.how_it_ended, trial.seconds) == (0, "finished", 1.5)


def test_of_a_trial_that_stopped_early_the_kept_model_counts(result_of: MakeResult) -> None:
    reason = "stopped early after step 2: no better loss; model/ is checkpoint-1"
    early = result_of(losses=(3.0, 2.0), validation=((1, 9.0), (2, 33.5)), best_step=1, reason=reason)
    assert early.how_it_ended == "finished: stopped early after step 2: no better loss"
    assert early.validation_loss == 9.0


def test_a_failed_trial_shows_the_first_line_of_its_error_and_where_the_rest_is(result_of: MakeResult) -> None:
    reason = "no memory " + 100 * "for this " + "\na second line"
    trial = result_of(exit_code=3, losses=(3.0, None), state="failed", reason=reason)
    assert trial.final_loss is None
    assert trial.how_it_ended.startswith("failed (exit code 3): no memory for this")
    assert trial.how_it_ended.endswith("... (more in trial-000.log)")
    assert len(trial.how_it_ended) < 200


def test_a_trial_without_a_record_of_its_end_shows_what_it_printed(result_of: MakeResult) -> None:
    printed = "loading\nerror: line 17 is broken\nmore: tunebook explain\n"
    trial = result_of(exit_code=4, printed=printed, state="running", is_recorded=False)
    assert trial.how_it_ended == "failed (exit code 4): error: line 17 is broken (more in trial-000.log)"


def test_ranked_by_the_metric_and_those_without_it_are_last() -> None:
    trials = rows(result(7, 0.01), result(0, 0.5), None, result(0, None), result(0, 0.4), result(0, 0.5))
    assert [(rank, row.number) for rank, row in ranked(trials, "final_loss")] == [
        *(("1", 4), ("2", 1), ("3", 5)),
        *(("", 0), ("", 2), ("", 3)),
    ]


@pytest.mark.parametrize(
    ("metric", "value", "is_higher_better", "cost"),
    [
        ("evaluation_score", 0.75, True, -0.75),
        ("evaluation_score", 12.0, False, 12.0),
        ("tokens_per_second_per_gpu", 300.0, True, -300.0),
        ("validation_loss", 2.5, True, 2.5),
        ("seconds", 9.0, True, 9.0),
        ("final_loss", None, True, None),
    ],
)
def test_a_lower_cost_is_better(metric: str, value: float | None, is_higher_better: bool, cost: float | None) -> None:
    trial = replace(result(), **{metric: value, "is_higher_better": is_higher_better})
    assert cost_of(trial, metric) == cost
    assert cost_of(replace(trial, exit_code=7), metric) is None


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 7, 4), 7), ((0, None), 6), ((2, None), 2)])
def test_the_exit_code_is_that_of_the_first_trial_that_did_not_finish(
    codes: tuple[int | None, ...], expected: int
) -> None:
    assert sweep_exit_code(rows(*(None if code is None else result(code) for code in codes))) == expected
    assert sweep_exit_code(rows(result(6, was_pruned=True), result(0))) == 0


def test_every_trial_is_in_the_file_and_in_the_table(tmp_path: Path) -> None:
    console = Console(width=160, record=True)
    paths = Row(number=3, values={"a": "/tmp/a[/b].jsonl"}, result=None)
    console.print(sweep_table([*rows(result(0, 0.5), result(7)), paths], "final_loss"))
    text = console.export_text()
    assert "validation loss" not in text  # which none measured
    assert all(expected in text for expected in ("ranked by final loss", "/tmp/a[/b].jsonl", "not ended", "trial-003"))
    write_csv(rows(result(0, 0.5), result(7), result(0, 0.25)), "final_loss", ["optimizer=adamw"], tmp_path)
    header, *lines = csv.reader((tmp_path / "sweep.csv").read_text().splitlines())
    assert header == [
        *("rank", "a", "optimizer", "exit_code", "how_it_ended", "evaluation_score", "validation_loss", "final_loss"),
        *("tokens_per_second_per_gpu", "seconds", "run_folder"),
    ]
    assert lines == [
        ["1", "2", "adamw", "0", "finished", "", "", "0.25", "", "1.5", str(tmp_path / "trial-002")],
        ["2", "0", "adamw", "0", "finished", "", "", "0.5", "", "1.5", str(tmp_path / "trial-000")],
        ["", "1", "adamw", "7", 'failed: a "bad", line', "", "", "", "", "1.5", str(tmp_path / "trial-001")],
    ]
