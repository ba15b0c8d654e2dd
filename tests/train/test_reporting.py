"""Trackers have one run per run folder, for all attempts."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from transformers.integrations import integration_utils

from tunebook.config.choices import TrackerName
from tunebook.config.schema import TrackingConfig
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train.reporting import set_up_tracking, tracker_environment

WANDB = TrackingConfig(name=TrackerName.wandb, project="mine")


@pytest.fixture
def attempt(config, tmp_path):
    """Start an attempt in a run folder with these variables; returns the variables that it set and its messages."""

    def start(tracking=WANDB, is_first_rank=True, **given):
        start_manifest(tmp_path, config, world_size=1, command=["tunebook", "train"])
        said = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        with mock.patch.dict(os.environ, kept | given, clear=True):
            set_up_tracking(tracking, tmp_path, is_first_rank=is_first_rank, say=said.append)
            found = {name: value for name, value in os.environ.items() if name.startswith(("WANDB", "TENSORBOARD"))}
        return found, said

    return start


def test_every_attempt_has_the_id_of_the_first_and_its_files_in_the_run_folder(attempt, tmp_path):
    first, said = attempt()
    assert first.keys() == {"WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"}
    assert (first["WANDB_PROJECT"], first["WANDB_DIR"], first["WANDB_RESUME"]) == ("mine", str(tmp_path), "allow")
    assert said == []
    assert read_manifest(tmp_path)["wandb_run_id"] == first["WANDB_RUN_ID"]
    assert attempt()[0] == attempt()[0] == first
    (tmp_path / "manifest.json").unlink()
    assert attempt()[0]["WANDB_RUN_ID"] != first["WANDB_RUN_ID"]  # of another run


def test_variables_of_the_user_are_kept(attempt, tmp_path):
    given = {"WANDB_RUN_ID": "my-id", "WANDB_DIR": "/scratch", "WANDB_RESUME": "must"}
    assert attempt(**given)[0].items() >= given.items()
    assert attempt()[0]["WANDB_RUN_ID"] == "my-id"
    assert read_manifest(tmp_path)["wandb_run_id"] == "my-id"


def test_a_project_that_is_not_used_is_named(attempt):
    found, said = attempt(WANDB_PROJECT="other")
    assert found["WANDB_PROJECT"] == "mine"
    assert said == ["WANDB_PROJECT=other is not used: the project is set by tracking.project=mine"]
    assert attempt(WANDB_PROJECT="mine")[1] == []


def test_only_the_first_rank_has_a_run(attempt, tmp_path):
    found, _ = attempt(is_first_rank=False, WANDB_PROJECT="mine")
    assert "WANDB_RUN_ID" not in found
    assert "wandb_run_id" not in read_manifest(tmp_path)


def test_tensorboard_writes_into_the_run_folder_and_others_need_no_variable(tmp_path):
    board = TrackingConfig(name=TrackerName.tensorboard)
    assert tracker_environment(board, tmp_path, {}) == {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard")}
    for name in (TrackerName.none, TrackerName.trackio):
        assert tracker_environment(TrackingConfig(name=name), tmp_path, {}) == {}


def test_tensorboard_drops_what_was_logged_after_the_checkpoint(config, run, stopped, changed, monkeypatch):
    writers, points = [], []

    def writer(folder, purge_step):
        writers.append((folder, purge_step))
        return SimpleNamespace(
            add_text=lambda *_: None, add_scalar=lambda *point: points.append(point), flush=int, close=int
        )

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    config = changed(config, tracking={"name": TrackerName.tensorboard}, training={"max_steps": 3})
    stopped(config, 2)
    folder, code, lines = run(config)
    assert code == 0
    assert writers == [(str(folder / "tensorboard"), step) for step in (1, 3)]
    assert [(step, loss) for key, loss, step in points if key == "train/loss"] == [
        (line["step"], line["loss"]) for line in lines
    ]
