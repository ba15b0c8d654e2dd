"""Trackers have one run per run folder, for all attempts; lines on the terminal are few."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from tunebook.config.choices import TrackerName
from tunebook.config.schema import TrackingConfig
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train.reporting import Progress, set_up_tracking


@pytest.fixture
def attempt(config, tmp_path):
    """Start an attempt in a run folder with these variables; returns the variables that trackers find."""

    def start(name=TrackerName.wandb, is_first_rank=True, **given):
        start_manifest(tmp_path, config, world_size=1, command=["tunebook", "train"])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        with mock.patch.dict(os.environ, kept | given, clear=True):
            tracking = TrackingConfig(name=name, project="mine")
            set_up_tracking(tracking, tmp_path, is_first_rank=is_first_rank)
            return {name: value for name, value in os.environ.items() if name.startswith(("WANDB", "TENSORBOARD"))}

    return start


def test_every_attempt_has_the_id_of_the_first_and_its_files_in_the_run_folder(attempt, tmp_path):
    first = attempt()
    run_id = read_manifest(tmp_path)["wandb_run_id"]
    assert first == {
        "WANDB_PROJECT": "mine", "WANDB_DIR": str(tmp_path), "WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow",
    }  # fmt: skip
    assert attempt() == first
    (tmp_path / "manifest.json").unlink()
    assert attempt()["WANDB_RUN_ID"] != run_id  # of another run


def test_variables_of_the_user_are_kept_but_for_the_project(attempt, tmp_path):
    given = {"WANDB_RUN_ID": "my-id", "WANDB_DIR": "/scratch", "WANDB_RESUME": "must"}
    assert attempt(**given, WANDB_PROJECT="other") == given | {"WANDB_PROJECT": "mine"}
    assert attempt()["WANDB_RUN_ID"] == read_manifest(tmp_path)["wandb_run_id"] == "my-id"


def test_other_ranks_and_other_trackers(attempt, tmp_path):
    assert "WANDB_RUN_ID" not in attempt(is_first_rank=False)
    assert "wandb_run_id" not in read_manifest(tmp_path)
    assert attempt(TrackerName.tensorboard) == {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard")}
    assert attempt(TrackerName.trackio) == attempt(TrackerName.none) == {}


def test_the_first_and_the_last_step_are_shown(capsys):
    progress = Progress()
    progress.start(3, 9)
    for step in range(4, 10):
        progress.advance(step, 0.5, 1234.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["step 4/9", "loss 0.5000", "1,234 tokens/s"], ["step 9/9", "loss 0.5000", "1,234 tokens/s"],
    ]  # fmt: skip
