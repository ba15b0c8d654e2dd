"""What a job writes into its run folder before a rank starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tunebook.data.prepared import Prepared
from tunebook.launch.job import plan_job, set_up_folder
from tunebook.record.manifest import read_manifest

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
