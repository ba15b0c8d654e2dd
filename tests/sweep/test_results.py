from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution
from rich.console import Console
from rich.table import Table

from tunebook.record.page.overview import summarize
from tunebook.record.run_record import read_run
from tunebook.sweep.results import (
    Goal,
    TrialResult,
    _evaluation_score,
    best_line,
    rank,
    sweep_exit_code,
    sweep_table,
    trial_table,
    write_csv,
)

MakeResult = Callable[..., TrialResult]


def order(results: list[TrialResult], goal: Goal | None = None) -> tuple[str | None, list[int], list[int]]:
    ranking = rank(results, goal)
    numbers = [[result.trial.number for result in part] for part in (ranking.ranked, ranking.unranked)]
    return ranking.measure, numbers[0], numbers[1]


def test_a_finished_trial_is_read_from_its_folder(make_result: MakeResult) -> None:
    found = make_result(0, losses=(3.0, 2.0, 1.0), speeds=(10.0, 400.0, 300.0), validation_loss=1.25, score=0.75)
    assert (found.final_loss, found.validation_loss, found.evaluation_score) == (1.0, 1.25, 0.75)
    assert found.tokens_per_second_per_gpu == 350.0  # the median of the others: the slow first step does not count
    assert (found.exit_code, found.how_it_ended, found.seconds) == (0, "finished", 1.5)


def test_a_trial_that_stopped_early_says_when(make_result: MakeResult) -> None:
    said = "stopped early after step 2: no better validation loss in 1 evaluation; model/ is checkpoint-1 (9.0000)"
    found = make_result(0, losses=(3.0, 2.0), reason=said)
    expected = "finished: stopped early after step 2: no better validation loss in 1 evaluation"
    assert (found.exit_code, found.how_it_ended, found.has_finished) == (0, expected, True)


def test_the_validation_loss_is_that_of_the_model_which_was_kept(make_result: MakeResult) -> None:
    kept_best = make_result(0, losses=(3.0, 2.0), validation_loss=33.5, best_step=1)
    kept_last = make_result(1, losses=(3.0, 2.0), validation_loss=12.0)
    assert (kept_best.validation_loss, kept_last.validation_loss) == (9.0, 12.0)  # 9.0 was measured at step 1
    assert order([kept_last, kept_best]) == ("validation loss", [0, 1], [])


def test_the_speed_is_the_one_that_a_report_tells(make_result: MakeResult) -> None:
    speeds = (10.0, 400.0, 300.0, 200.0)
    found = make_result(0, losses=(4.0, 3.0, 2.0, 1.0), speeds=speeds)
    assert found.tokens_per_second_per_gpu == 300.0  # of the last three; 250 with the first, which is warming up
    assert found.tokens_per_second_per_gpu == summarize(read_run(found.run_folder)).tokens_per_second_per_gpu


def test_a_failed_trial_says_why(make_result: MakeResult) -> None:
    invalid = make_result(0, exit_code=7, losses=(3.0, None), state="invalid", reason="step 2: the loss is NaN")
    assert (invalid.how_it_ended, invalid.final_loss) == ("invalid: step 2: the loss is NaN", None)
    wordless = make_result(1, exit_code=1, state="running")
    assert wordless.how_it_ended == "failed: it ended unexpectedly (exit code 1), see what it printed"
    early = make_result(4, exit_code=4, state="running")
    assert early.how_it_ended == "failed: the data is wrong (exit code 4), see what it printed"
    stopped = make_result(2, exit_code=6, state="stopped", reason="asked to", was_interrupted=True)
    assert stopped.how_it_ended == "stopped with the sweep"
    assert make_result(3, exit_code=None).how_it_ended == "not started: the sweep was stopped"


@pytest.mark.parametrize("reason", ["no memory\n" + 11 * "a line of an error\n", "no memory " + 100 * "for this "])
def test_a_long_reason_is_cut_and_says_where_the_rest_is(make_result: MakeResult, reason: str) -> None:
    recorded = make_result(0, exit_code=3, state="failed", reason=reason).how_it_ended
    killed = make_result(1, exit_code=1, state="running", killed=reason).how_it_ended
    for how_it_ended, file in ((recorded, "trial-000/manifest.json"), (killed, "trial-001.json")):
        assert how_it_ended.startswith("failed: no memory")
        assert how_it_ended.endswith(f"{file})")
        assert len(how_it_ended) < 180
        assert "a line" not in how_it_ended


def test_ranked_by_the_evaluation_score_before_any_loss(make_result: MakeResult) -> None:
    results = [
        make_result(0, losses=(1.0,), validation_loss=1.0, score=0.5),
        make_result(1, losses=(2.0,), validation_loss=2.0, score=0.9),
        make_result(2, losses=(0.1,), score=0.7),
    ]
    assert order(results) == ("evaluation score", [1, 2, 0], [])


def test_a_score_that_is_better_low_is_ranked_low_first(make_result: MakeResult) -> None:
    results = [make_result(n, losses=(1.0,), score=s, is_higher_better=False) for n, s in enumerate((12.0, 8.0))]
    assert order(results) == ("evaluation score", [1, 0], [])


def test_without_a_score_for_all_the_validation_loss_decides(make_result: MakeResult) -> None:
    results = [
        make_result(0, losses=(0.1,), validation_loss=1.5, score=0.9),
        make_result(1, losses=(0.2,), validation_loss=1.4),
    ]
    assert order(results) == ("validation loss", [1, 0], [])


def test_equal_scores_are_ordered_by_the_loss(make_result: MakeResult) -> None:
    losses = (0.5, 0.3, 0.4)
    results = [make_result(n, losses=(loss,), score=1.0) for n, loss in enumerate(losses)]
    assert order(results) == ("evaluation score", [1, 2, 0], [])


def test_otherwise_the_final_loss_and_equal_ones_stay_in_order(make_result: MakeResult) -> None:
    results = [make_result(n, losses=(9.0, loss)) for n, loss in enumerate((0.5, 0.3, 0.5))]
    assert order(results) == ("final loss", [1, 0, 2], [])


def test_failed_trials_are_last_however_good_their_loss(make_result: MakeResult) -> None:
    results = [
        make_result(0, exit_code=7, losses=(0.01,), state="invalid", reason="a leak"),
        make_result(1, losses=(0.5,)),
        make_result(2, exit_code=None),
        make_result(3, losses=(0.4,)),
    ]
    assert order(results) == ("final loss", [3, 1], [0, 2])


def test_without_a_common_measurement_nothing_is_ranked(make_result: MakeResult) -> None:
    assert order([make_result(0), make_result(1, exit_code=1)]) == (None, [], [0, 1])


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 7, 4), 7), ((0, None), 6), ((2, None), 2)])
def test_the_exit_code_is_that_of_the_first_trial_that_did_not_finish(
    make_result: MakeResult, codes: tuple[int | None, ...], expected: int
) -> None:
    results = [make_result(number, exit_code=code, reason="why") for number, code in enumerate(codes)]
    assert sweep_exit_code(results) == expected


def test_a_goal_decides_alone_and_in_its_direction(make_result: MakeResult) -> None:
    speeds = (10.0, 30.0, 20.0)
    results = [make_result(n, losses=(1.0 + n,), speeds=(speed,), score=0.5) for n, speed in enumerate(speeds)]
    fastest = Goal(metric="tokens_per_second_per_gpu", direction="maximize")
    assert order(results, fastest) == ("tokens per second per gpu", [1, 2, 0], [])
    worst = Goal(metric="final_loss", direction="maximize")
    assert order(results, worst) == ("final loss", [2, 1, 0], [])


def test_a_trial_without_the_goals_metric_is_not_ranked(make_result: MakeResult) -> None:
    results = [
        make_result(0, exit_code=7, losses=(0.1,), state="invalid", reason="a leak"),
        make_result(1, losses=(None,)),
        make_result(2, losses=(0.4,)),
        make_result(3, losses=(0.3,)),
    ]
    goal = Goal(metric="final_loss", direction="minimize")
    assert [goal.value_of(result) for result in results] == [None, None, 0.4, 0.3]
    assert order(results, goal) == ("final loss", [3, 2], [1, 0])
    assert order(results[:2], goal) == (None, [], [1, 0])


def test_a_pruned_trial_is_no_failure_and_says_why(make_result: MakeResult) -> None:
    pruned = make_result(0, exit_code=6, losses=(3.0,), pruned="at step 1, loss 3 is worse", was_interrupted=True)
    assert pruned.how_it_ended == "pruned: at step 1, loss 3 is worse"
    assert sweep_exit_code([pruned, make_result(1)]) == 0
    assert sweep_exit_code([pruned, make_result(2, exit_code=4)]) == 4


def test_a_killed_trial_says_what_killed_it(make_result: MakeResult) -> None:
    killed = make_result(0, exit_code=1, state="running", killed="its process was killed by signal 9")
    assert killed.how_it_ended == "failed: its process was killed by signal 9"


def test_an_earlier_attempts_reason_is_not_taken_for_the_last_ones(make_result: MakeResult) -> None:
    found = make_result(0, exit_code=1, state="stopped", reason="stopped after step 6", recorded_exit_code=6)
    assert found.how_it_ended == "failed: it ended unexpectedly (exit code 1), see what it printed"


def test_a_mean_over_the_tasks_that_did_not_fail_is_no_score(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    task = {"value": 0.75, "higher_is_better": True, "subtasks": []}
    for failed, expected in (({}, 0.75), ({"numbers": "ValueError"}, None)):
        record = {"tasks": {"words": task}, "failed": failed}
        (tmp_path / "evaluation" / "after.json").write_text(json.dumps(record))
        assert _evaluation_score(tmp_path) == (expected, True)


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
