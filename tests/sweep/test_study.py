"""Optuna asked and told, with trials whose results are written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from tunebook.sweep.study import Study, Sweep, find_folder, make_folder, read_sweep, write_sweep

SEARCHED = ["training.max_steps=3", "optimizer.learning_rate=tag(log,interval(1e-5,1e-1))", "schedule=cosine,linear"]
LISTED = ["training.seed=0,1", "training.max_steps=3,4"]


def sweep_of(overrides: list[str], **values: Any) -> Sweep:
    values = {"num_trials": None, "metric": "final_loss", "config_sha256": "0" * 64} | values
    return Sweep(recipe="quickstart", recipes_dirs=[], overrides=overrides, **values)


def study_in(folder: Path, overrides: list[str] = LISTED, **values: Any) -> Study:
    folder.mkdir(exist_ok=True)
    study = Study(folder, sweep_of(overrides, **values))
    study.enqueue_grid()
    return study


def log(study: Study, number: int, *losses: float | None) -> None:
    """Write what a trial logs."""
    study.run_folder(number).mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
    (study.run_folder(number) / "metrics.jsonl").write_text("".join(lines))


def loss_of(trial: optuna.Trial) -> float:
    """Best at a learning rate of 1e-3, and with a linear schedule."""
    return abs(math.log10(trial.params["optimizer.learning_rate"]) + 3) + (trial.params["schedule"] == "cosine")


def run(study: Study, *, up_to: int = 10**6) -> list[tuple[int, dict[str, Any]]]:
    done = list[tuple[int, dict[str, Any]]]()
    while len(done) < up_to and (trial := study.next_trial()) is not None:
        log(study, trial.number, loss_of(trial))
        study.finish(trial.number, 0, seconds=1.0)
        done.append((trial.number, trial.params))
    return done


def states(study: Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


def test_a_grid_runs_once_in_order_also_after_a_kill_while_it_was_enqueued(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    assert (study.num_trials, study.num_left, states(study)) == (4, 4, ["WAITING"] * 4)
    again = study_in(tmp_path)
    assert len(again.trials) == 4
    taken = [trial.params for _ in range(4) if (trial := again.next_trial()) is not None]
    assert taken == sweep_of(LISTED).space.grid()
    assert again.next_trial() is None


def test_an_interrupted_search_proposes_what_it_would_have_proposed(tmp_path: Path) -> None:
    whole = run(study_in(tmp_path / "whole", SEARCHED, num_trials=14))
    parts = [run(study_in(tmp_path / "parts", SEARCHED, num_trials=14), up_to=count) for count in (12, 9)]
    assert [*parts[0], *parts[1]] == whole
    assert [number for number, _ in run(study_in(tmp_path / "parts", SEARCHED, num_trials=15))] == [14]
    other = run(study_in(tmp_path / "other", SEARCHED, num_trials=3, seed=50))
    assert not any(mine[1] == theirs[1] for mine, theirs in zip(other, whole, strict=False))


@pytest.mark.parametrize(
    ("exit_code", "loss", "state"),
    [(0, 0.5, "COMPLETE"), (7, 0.1, "FAIL"), (0, None, "FAIL"), (2, None, "WAITING"), (6, 0.1, "WAITING")],
)
def test_what_would_end_the_same_way_is_final_and_anything_else_runs_again(
    tmp_path: Path, exit_code: int, loss: float | None, state: str
) -> None:
    study = study_in(tmp_path, SEARCHED, num_trials=1)
    first = study.next_trial()
    assert first is not None
    log(study, 0, loss)
    study.finish(0, exit_code, seconds=2.0)
    again = study_in(tmp_path, SEARCHED, num_trials=1)
    again.reopen()
    assert states(again) == [state]
    assert again.rows()[0].result is not None
    trial = again.next_trial()
    assert (trial is not None) is (state == "WAITING")
    if trial is not None:
        assert (trial.number, trial.params) == (0, first.params)
        assert again.finish(0, 0, seconds=3.0).seconds == 5.0  # of both turns


def test_a_trial_that_finished_after_its_sweep_was_killed_is_not_run_again(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    study.next_trial()
    study.next_trial()
    log(study, 0, 0.25)
    status = {"state": "finished", "exit_code": 0, "reason": None, "seconds": 4.0}
    (study.run_folder(0) / "manifest.json").write_text(json.dumps({"format": 1, "status": status}))
    again = study_in(tmp_path)
    again.reopen()
    assert states(again) == ["COMPLETE", "WAITING", "WAITING", "WAITING"]
    result = again.rows()[0].result
    assert result is not None
    assert (result.final_loss, result.seconds) == (0.25, 4.0)


def test_a_trial_worse_than_the_median_is_pruned_at_the_step_where_it_is(tmp_path: Path) -> None:
    study = study_in(tmp_path, SEARCHED, num_trials=20, prune=2)

    def worse_at(*losses: float | None) -> int | None:
        trial = study.next_trial()
        assert trial is not None
        assert study.worse_at(trial) is None  # nothing logged yet
        log(study, trial.number, *losses)
        step = study.worse_at(trial)
        if step is None:
            assert study.worse_at(trial) is None  # nothing is reported twice
            study.finish(trial.number, 0, seconds=1.0)
        else:
            study.finish(trial.number, 6, seconds=1.0, was_pruned=True)
        return step

    for number in range(5):
        assert worse_at(9.0 - number, 5.0 - number, 3.0 - number) is None
    assert worse_at(6.9, None, 0.9) is None  # the medians are 7, 3 and 1
    assert worse_at(7.1, 3.1, 0.0) == 2  # its first step is worse too, but too early
    assert states(study)[-1] == "PRUNED"
    study.reopen()
    assert study.num_open == 20 - 7


def test_a_lower_score_is_better_if_its_tasks_say_so(tmp_path: Path) -> None:
    study = study_in(tmp_path, metric="evaluation_score")
    for score, is_higher_better in ((12.0, False), (0.5, True)):
        trial = study.next_trial()
        assert trial is not None
        (study.run_folder(trial.number) / "evaluation").mkdir(parents=True)
        task = {"value": score, "higher_is_better": is_higher_better, "subtasks": []}
        after = study.run_folder(trial.number) / "evaluation" / "after.json"
        after.write_text(json.dumps({"tasks": {"words": task}}))
        study.finish(trial.number, 0, seconds=1.0)
    assert [trial.value for trial in study.trials[:2]] == [12.0, -0.5]  # what Optuna minimizes


def test_the_newest_folder_of_the_same_sweep_is_found(tmp_path: Path) -> None:
    one, two, other = (make_folder(tmp_path / "out") for _ in range(3))
    for folder, words in ((one, LISTED), (two, LISTED), (other, LISTED[:1])):
        write_sweep(sweep_of(words), folder)
    assert find_folder(sweep_of([*LISTED, "training.resume=auto"], metric="seconds"), tmp_path / "out") == two
    assert find_folder(sweep_of(LISTED, config_sha256="1"), tmp_path / "out") is None
    assert read_sweep(other) == sweep_of(LISTED[:1])


def test_a_search_with_more_trials_is_the_same_and_one_with_another_seed_is_not() -> None:
    identity = sweep_of(SEARCHED, num_trials=3).identity
    assert sweep_of(SEARCHED, num_trials=5).identity == identity
    others = [{"seed": 1}, {"metric": "seconds"}, {"overrides": [SEARCHED[1], "schedule=linear,cosine"]}]
    assert all(sweep_of(**{"overrides": SEARCHED, "num_trials": 3} | other).identity != identity for other in others)
