from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution
from rich.console import Console
from rich.table import Table

from tunebook.sweep.results import TrialResult, rank
from tunebook.sweep.table import best_line, sweep_table, trial_table, write_csv

MakeResult = Callable[..., TrialResult]


def test_the_csv_has_every_override_and_every_measurement_best_first(make_result: MakeResult, tmp_path: Path) -> None:
    results = [
        make_result(0, losses=(0.5,), speeds=(100.0,)),
        make_result(1, exit_code=7, state="invalid", reason='a "bad", loss'),
        make_result(2, losses=(0.25,), speeds=(90.0,)),
    ]
    write_csv(rank(results), tmp_path / "sweep.csv")
    header, *rows = csv.reader((tmp_path / "sweep.csv").read_text().splitlines())
    assert header == [
        "rank", "training.seed", "optimizer", "exit_code", "how_it_ended", "final_loss", "validation_loss",
        "evaluation_score", "tokens_per_second_per_gpu", "seconds", "run_folder",
    ]  # fmt: skip
    folders = [str(result.run_folder) for result in results]
    assert rows == [
        ["1", "2", "adamw", "0", "finished", "0.25", "", "", "90.0", "1.5", folders[2]],
        ["2", "0", "adamw", "0", "finished", "0.5", "", "", "100.0", "1.5", folders[0]],
        ["", "1", "adamw", "7", 'invalid: a "bad", loss', "", "", "", "", "1.5", folders[1]],
    ]


def printed(table: Table) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def shown(results: list[TrialResult]) -> str:
    return printed(sweep_table(rank(results)))


def test_the_table_says_what_it_is_ranked_by_and_hides_what_nobody_has(make_result: MakeResult) -> None:
    text = shown([make_result(0, losses=(0.5,), score=0.5), make_result(1, losses=(0.7,), score=0.9)])
    assert "Sweep, ranked by evaluation score" in text
    assert "validation loss" not in text
    assert "optimizer" not in text  # the same in every trial
    assert text.index("trial-001") < text.index("trial-000")


def test_the_table_of_failures_gives_the_reasons(make_result: MakeResult) -> None:
    text = shown([make_result(0, exit_code=4, state="failed", reason="line 17 is broken")])
    assert "not ranked: no trial finished" in text
    assert "failed: line 17 is broken" in text


@pytest.mark.parametrize("value", ["[q_proj]", "[k_proj,v_proj]", "/tmp/a[/b].jsonl", ":smile:"])
def test_a_value_that_looks_like_markup_is_shown_as_it_is(value: str, make_result: MakeResult) -> None:
    result = make_result(0, losses=(0.5,))
    trial = replace(result.trial, swept={"dataset.path": value})
    assert value in printed(sweep_table(rank([replace(result, trial=trial)])))
    assert value in printed(trial_table([trial], None))


def test_what_a_search_chooses_from_is_shown_as_it_is() -> None:
    space = {"dataset.path": CategoricalDistribution(["a[/b].jsonl", "[bold]"])}
    assert "a[/b].jsonl, [bold]" in printed(trial_table([], space))


def test_trials_are_called_what_their_folders_are(make_result: MakeResult) -> None:
    best = make_result(2, losses=(0.5,))
    again = "best: trial-002, again: tunebook train quickstart optimizer=adamw training.seed=2"
    assert best_line("quickstart", best, []) == again
    assert best_line("quickstart", best, [Path("/my book"), Path("b")]) == (
        f"{again} --recipes-dir '/my book' --recipes-dir b"
    )
    assert best.run_folder.name == "trial-002"
    assert "trial-002" in printed(trial_table([best.trial], None))
