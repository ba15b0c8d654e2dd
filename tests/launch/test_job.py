"""What a job writes into its run folder before a rank starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tunebook.data.prepared import Prepared
from tunebook.launch.job import plan_job, set_up_folder
from tunebook.record.manifest import read_manifest, recorded_fingerprint, update_manifest

PREPARED = cast(
    Prepared,
    SimpleNamespace(
        folder=Path("/prepared"),
        tokenizer_sha256="1",
        chat_template_sha256="2",
        records=[],
        fingerprint="3",
        content_sha256="4",
        parts=dict,
    ),
)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("quickstart", ["training.max_steps=3", "outputs=/x"]),
        (None, ["model=quickstart", "dataset=quickstart", "training.global_samples=4", "training.max_length=128"]),
    ],
    ids=["recipe", "no_recipe"],
)
def test_the_manifest_says_what_trains_the_same_whoever_typed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str | None, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/tunebook", "reproduce", "some/run"])
    job = plan_job(recipe, words, [])
    set_up_folder(job, job.plan, PREPARED, tmp_path)
    manifest: dict[str, Any] = read_manifest(tmp_path)
    assert manifest["command"] == ["tunebook", "train", *([recipe] if recipe else []), *words]
    assert manifest["typed"] == ["tunebook", "reproduce", "some/run"]


def test_of_a_run_that_is_trained_already_the_manifest_keeps_what_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plan_job("quickstart", ["training.max_steps=3"], [])
    set_up_folder(job, job.plan, PREPARED, tmp_path)
    update_manifest(tmp_path, {"model": {"weights_fingerprint": "1" * 64}})
    set_up_folder(job, job.plan, PREPARED, tmp_path)
    assert recorded_fingerprint(read_manifest(tmp_path)) is None, "it starts anew"
    update_manifest(tmp_path, {"model": {"weights_fingerprint": "1" * 64}})
    monkeypatch.setattr("tunebook.launch.job.is_trained", lambda folder, config: True)
    set_up_folder(job, job.plan, PREPARED, tmp_path)
    assert recorded_fingerprint(read_manifest(tmp_path)) == "1" * 64
