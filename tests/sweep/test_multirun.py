from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from tunebook.errors import RequestError
from tunebook.sweep.multirun import check_launcher, run_multirun, visible_to_hydra
from tunebook.sweep.trials import Trial

TRIAL = Trial(number=0, overrides=("training.seed=0",), swept={"training.seed": "0"})


def test_hydra_calls_the_job_once_per_combination_and_leaves_nothing_changed(tmp_path: Path) -> None:
    numbers: list[int] = []
    arguments = list(sys.argv)
    folder = tmp_path / "it's = a, folder"
    overrides = ["optimizer.learning_rate=0.1,0.2", "parallelism=zero2", "parallelism.reduce_bucket_size=10,20,30"]
    run_multirun("quickstart", overrides, [], [], folder, numbers.append)
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert sys.argv == arguments
    assert not GlobalHydra.instance().is_initialized()
    assert [file.name for file in folder.iterdir()] == ["multirun.yaml"]


def test_a_recipe_of_the_users_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\ndefaults: [quickstart, _self_]\ntitle: mine\n")
    numbers: list[int] = []
    run_multirun("mine", ["training.seed=0,1"], [], [tmp_path], tmp_path / "sweep", numbers.append)
    assert numbers == [0, 1]


def test_ctrl_c_in_a_job_ends_the_sweep(tmp_path: Path) -> None:
    numbers: list[int] = []

    def stop_at_one(number: int) -> None:
        numbers.append(number)
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_multirun("quickstart", ["training.seed=0,1,2"], [], [], tmp_path, stop_at_one)
    assert numbers == [0, 1]
    assert not GlobalHydra.instance().is_initialized()


def test_a_launcher_that_is_not_installed_is_named() -> None:
    with pytest.raises(RequestError, match=r"Could not find 'hydra/launcher/nowhere'.*a package of its own"):
        check_launcher("quickstart", TRIAL, ["hydra/launcher=nowhere"], [])
    check_launcher("quickstart", TRIAL, ["hydra/launcher=basic"], [])


def test_keys_that_hydra_cannot_add_are_kept_from_it() -> None:
    trial = Trial(number=0, overrides=(), swept={"dataset.parts.a.weight": "1"})
    words = ["dataset.parts.a.weight=1,2", "dataset.parts.b.path=x.jsonl", "training.seed=1"]
    assert visible_to_hydra(words, trial) == ["dataset.parts.a.weight=1,2", "training.seed=1"]
