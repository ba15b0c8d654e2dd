"""What a job writes into its run folder before a rank starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tunebook.commands.job import plan_job
from tunebook.commands.preflight import require_runnable
from tunebook.commands.train import set_up_folder
from tunebook.data.prepared import Prepared
from tunebook.errors import RequestError
from tunebook.record.manifest import read_manifest, update_manifest

PREPARED = cast(
    Prepared,
    SimpleNamespace(
        folder=Path("/prepared"),
        tokenizer_sha256="1",
        chat_template_sha256="2",
        template_date=None,
        records=[],
        fingerprint="3",
        content_sha256="4",
        parts=dict,
    ),
)


def test_the_manifest_says_what_trains_the_same_and_what_a_trained_run_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["training.max_steps=3", "outputs=/x"]
    job = plan_job("quickstart", words, [])
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    assert read_manifest(tmp_path)["command"] == [
        "tunebook",
        "train",
        "quickstart",
        "training.max_steps=3",
        "outputs=/x",
    ]
    update_manifest(tmp_path, {"model": {"weights_fingerprint": "1" * 64}})
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    assert read_manifest(tmp_path)["model"]["weights_fingerprint"] is None, "it starts anew"
    update_manifest(tmp_path, {"model": {"weights_fingerprint": "1" * 64}})
    monkeypatch.setattr("tunebook.commands.train.is_trained", lambda folder, config: True)
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    assert read_manifest(tmp_path)["model"]["weights_fingerprint"] == "1" * 64


@pytest.mark.nightly
def test_a_task_that_cannot_be_loaded_is_refused_before_anything_is_prepared() -> None:
    job = plan_job("quickstart", ["hardware=cpu", "evaluation=tasks", "evaluation.tasks=[gsm8k]"], [])
    with pytest.raises(RequestError) as raised:  # there is no network
        require_runnable(job)
    assert raised.value.problem_id == "task-data-missing"
