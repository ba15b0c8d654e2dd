"""Optuna asked and told, with trials whose results are written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from tunebook.errors import RequestError
from tunebook.sweep.folder import SweepFolder
from tunebook.sweep.options import METRICS, SweepOptions
from tunebook.sweep.results import Goal
from tunebook.sweep.space import read_space
from tunebook.sweep.study import NUM_NEVER_PRUNED, Search
from tunebook.sweep.trial_process import TrialEnd, write_trial_end
from tunebook.sweep.trials import Trial

WORDS = ["training.max_steps=3", "optimizer.learning_rate=tag(log,interval(1e-5,1e-1))", "schedule=cosine,linear"]


def search_in(folder: SweepFolder, num_trials: int = 20, *, metric: str = "final_loss", **options: Any) -> Search:
    fixed, space = read_space(WORDS)
    goal = Goal(metric=metric, direction=METRICS[metric])
    return Search(fixed, space, goal, SweepOptions(search="optuna", num_trials=num_trials, **options), folder)


def loss_of(trial: Trial) -> float:
    """Best at a learning rate of 1e-3, and with a linear schedule."""
    distance = abs(math.log10(float(trial.swept["optimizer.learning_rate"])) + 3)
    return distance + (trial.swept["schedule"] == "cosine")


def end(folder: SweepFolder, trial: Trial, *, exit_code: int = 0, loss: float | None = None, **how: object) -> None:
    """Write what a trial leaves."""
    run_folder = folder.run_folder(trial)
    run_folder.mkdir(exist_ok=True)
    (run_folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    record = TrialEnd(exit_code=exit_code, seconds=1.0, was_interrupted=bool(how.get("interrupted")))
    write_trial_end(record, folder.end_file(trial))


def run_trials(search: Search, folder: SweepFolder, *, up_to: int = 10**6) -> list[Trial]:
    done: list[Trial] = []
    while len(done) < up_to and (trial := search.next_trial()) is not None:
        end(folder, trial, loss=loss_of(trial))
        search.tell(trial)
        done.append(trial)
    return done


def states(folder: SweepFolder) -> list[str]:
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder.path / "study.jsonl"))
    )
    return [trial.state.name for trial in optuna.load_study(study_name="sweep", storage=storage).trials]


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(path=tmp_path)


def test_a_search_comes_close_to_the_best(folder: SweepFolder) -> None:
    trials = run_trials(search_in(folder, 30), folder)
    assert [trial.number for trial in trials] == list(range(30))
    assert trials[0].overrides[0] == "training.max_steps=3"
    early, late = (sum(map(loss_of, part)) / 10 for part in (trials[:10], trials[-10:]))
    assert late < 0.6 * early  # ten at random, then proposals that learn from them
    assert min(map(loss_of, trials)) < 0.2


def test_an_interrupted_search_proposes_what_it_would_have_proposed(tmp_path: Path) -> None:
    one, other = (SweepFolder(path=tmp_path / name) for name in ("one", "other"))
    one.path.mkdir()
    other.path.mkdir()
    through = run_trials(search_in(one, 16), one)
    parts = [*run_trials(search_in(other, 16), other, up_to=12), *run_trials(search_in(other, 16), other)]
    assert parts == through
    assert run_trials(search_in(other, 16), other) == []
    assert search_in(other, 16).trials == through
    assert [trial.number for trial in run_trials(search_in(other, 18), other)] == [16, 17]  # more were asked for


def test_another_seed_proposes_other_values(tmp_path: Path) -> None:
    found = []
    for seed in (0, 50):
        folder = SweepFolder(path=tmp_path / str(seed))
        folder.path.mkdir()
        found.append([trial.swept for trial in run_trials(search_in(folder, 3, seed=seed), folder)])
    assert not any(one == other for one, other in zip(*found, strict=True))


def test_failed_trials_are_told_as_failed_and_count(folder: SweepFolder) -> None:
    search = search_in(folder, 4)
    for exit_code, loss in ((0, 0.5), (7, 0.1), (0, None), (2, None)):
        trial = search.next_trial()
        assert trial is not None
        end(folder, trial, exit_code=exit_code, loss=loss)
        search.tell(trial)
    assert search.next_trial() is None
    assert states(folder) == ["COMPLETE", "FAIL", "FAIL", "FAIL"]
    again = search_in(folder, 4)
    assert again.next_trial() == trial  # what refused the last one may have been put right by now
    assert again.next_trial() is None


@pytest.mark.parametrize("how", ["under way", "stopped", "unexpected"])
def test_a_trial_that_did_not_come_to_its_end_is_taken_up_with_its_values(folder: SweepFolder, how: str) -> None:
    search = search_in(folder, 3)
    first, second = run_trials(search, folder, up_to=1)[0], search.next_trial()
    assert second is not None
    if how != "under way":
        end(folder, second, exit_code=6 if how == "stopped" else 1, interrupted=how == "stopped")
        search.tell(second)
    again = search_in(folder, 3)
    assert again.trials == [first, second]
    taken_up = run_trials(again, folder)
    assert [trial.number for trial in taken_up] == [1, 2]
    assert taken_up[0] == second
    assert states(folder) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_that_finished_unseen_is_told_and_not_run_again(folder: SweepFolder) -> None:
    search = search_in(folder, 2)
    trial = search.next_trial()
    assert trial is not None
    end(folder, trial, loss=0.25)
    again = search_in(folder, 2)
    assert states(folder) == ["COMPLETE"]
    assert [trial.number for trial in run_trials(again, folder)] == [1]


def test_a_lock_that_a_killed_sweep_left_behind_is_no_lock(folder: SweepFolder) -> None:
    run_trials(search_in(folder, 1), folder)
    (folder.path / "study.jsonl.lock").symlink_to(folder.path / "study.jsonl")
    assert len(run_trials(search_in(folder, 2), folder)) == 1


def test_trials_side_by_side_get_different_values(folder: SweepFolder) -> None:
    search = search_in(folder, 20)
    run_trials(search, folder, up_to=12)
    together = [search.next_trial() for _ in range(3)]
    rates = {trial.swept["optimizer.learning_rate"] for trial in together if trial is not None}
    assert len(rates) == 3


def test_a_trial_worse_than_the_median_is_pruned_at_the_step_where_it_is(folder: SweepFolder) -> None:
    search = search_in(folder, 20, prune=2)

    def curve(trial: Trial, losses: list[float]) -> str | None:
        folder.run_folder(trial).mkdir()
        watch = search.watch(trial)
        assert watch is not None
        assert watch() is None  # nothing logged yet
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        lines.insert(1, {"step": 1, "validation_loss": 99.0})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder.run_folder(trial) / "metrics.jsonl").write_text(text)
        return watch()

    for number in range(NUM_NEVER_PRUNED):
        trial = search.next_trial()
        assert trial is not None
        assert curve(trial, [9.0 - number, 5.0 - number, 3.0 - number]) is None
        write_trial_end(TrialEnd(exit_code=0, seconds=1.0, was_interrupted=False), folder.end_file(trial))
        search.tell(trial)
    good, bad = search.next_trial(), search.next_trial()
    assert good is not None and bad is not None
    assert curve(good, [6.9, 2.9, 0.9]) is None  # the medians are 7, 3 and 1
    reason = curve(bad, [7.1, 3.1, 0.0])  # its first step is worse too, but too early to tell
    assert reason == "at step 2, loss 3.1 is worse than the median of the trials before"
    record = TrialEnd(exit_code=6, seconds=1.0, was_interrupted=True, was_pruned=True, reason=reason)
    write_trial_end(record, folder.end_file(bad))
    search.tell(bad)
    assert states(folder)[-1] == "PRUNED"
    assert bad not in [search_in(folder, 7, prune=2).next_trial()]


def test_nobody_watches_where_pruning_was_not_asked_for(folder: SweepFolder) -> None:
    search = search_in(folder, 2)
    trial = search.next_trial()
    assert trial is not None
    assert search.watch(trial) is None


@pytest.mark.parametrize("named", [False, True])
def test_a_score_that_is_better_low_is_not_searched_high_by_accident(folder: SweepFolder, named: bool) -> None:
    search = search_in(folder, 2, metric="evaluation_score", direction="maximize" if named else None)
    trial = search.next_trial()
    assert trial is not None
    end(folder, trial, loss=1.0)
    (folder.run_folder(trial) / "evaluation").mkdir()
    task = {"value": 12.0, "higher_is_better": False, "subtasks": []}
    (folder.run_folder(trial) / "evaluation" / "after.json").write_text(json.dumps({"tasks": {"perplexity": task}}))
    if named:
        search.tell(trial)
        assert states(folder) == ["COMPLETE"]
    else:
        with pytest.raises(RequestError, match=r"better when lower.*add --direction=minimize"):
            search.tell(trial)
