"""An unavailable hub model is refused early and without waiting for a network."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tunebook.config.schema import ModelConfig
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.model.hub import fetch_config, fetch_weights
from tunebook.model.load import check_model

MODEL = ModelConfig(name="organization/name", revision="abc")


def test_a_repository_without_a_config_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **options: Any) -> str:
        assert (name, options["revision"]) == ("organization/name", "abc")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(RequestError) as caught:
        check_model(MODEL)
    assert caught.value.problem_id == "hub-cannot-load"
    (tmp_path / "config.json").write_text("{}")
    check_model(MODEL)
    assert fetch_weights(MODEL) == tmp_path


def test_without_a_network_the_error_says_how_to_bring_the_model() -> None:
    for fetch in (fetch_config, fetch_weights, check_model):
        with pytest.raises(RequestError, match=r"hf download organization/name --revision abc.*model=DIR") as caught:
            fetch(MODEL)
        assert caught.value.problem_id == "hub-out-of-reach"


def test_full_disk_during_a_download_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    with pytest.raises(DoesNotFitError) as caught:
        fetch_weights(MODEL)
    assert caught.value.problem_id == "disk-full"
