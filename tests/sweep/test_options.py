from __future__ import annotations

from typing import Any

import pytest

from tunebook.errors import RequestError
from tunebook.sweep.options import METRICS, SweepOptions, check_options

SEARCH: dict[str, Any] = {"search": "optuna", "num_trials": 4}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jobs": 1},
        {"launcher": "joblib"},
        {"launcher": "slurm", "jobs": 3, "metric": "seconds"},
        SEARCH,
        SEARCH | {"metric": "final_loss", "direction": "maximize", "seed": 0, "prune": 1},
    ],
)
def test_what_goes_together_passes(options: dict[str, Any]) -> None:
    check_options(SweepOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "jobib"}, r"--launcher=jobib: .*Did you mean 'joblib'\? Choose basic, joblib, slurm"),
        ({"jobs": 0, "launcher": "joblib"}, r"--jobs=0: at least one.*type --jobs=2"),
        ({"jobs": 2}, r"basic launcher runs one trial at a time; type --launcher=joblib --jobs=2"),
        ({"metric": "final_los"}, r"--metric=final_los: .*'final_loss'\? Choose evaluation_score, validation_loss"),
        ({"direction": "minimize"}, r"--direction=minimize says nothing without a metric"),
        ({"metric": "seconds", "direction": "min"}, r"--direction=min: .*Choose minimize, maximize"),
        ({"search": "optna", "num_trials": 4}, r"--search=optna: .*Did you mean 'optuna'"),
        ({"num_trials": 4}, r"--num-trials belongs to a search.*--search=optuna"),
        ({"seed": 0}, r"--seed belongs to a search"),
        ({"prune": 5}, r"--prune belongs to a search"),
        ({"search": "optuna"}, r"add --num-trials=20"),
        ({"search": "optuna", "num_trials": 0}, r"--num-trials=0: a search needs at least one trial; type"),
        (SEARCH | {"seed": -1}, r"--seed=-1: a seed is a whole number from 0 to 2147483647"),
        (SEARCH | {"prune": 0}, r"--prune=0: this is the step from which.*type --prune=50"),
    ],
)
def test_what_is_wrong_says_what_to_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        check_options(SweepOptions(**options))
    assert raised.value.problem_id == "sweep-option"


def test_losses_and_time_are_better_low_scores_and_speed_high() -> None:
    better_high = {name for name, direction in METRICS.items() if direction == "maximize"}
    assert better_high == {"evaluation_score", "tokens_per_second_per_gpu"}
    assert set(METRICS) - better_high == {"validation_loss", "final_loss", "seconds"}
