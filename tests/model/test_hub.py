"""An unavailable hub model is refused early and without waiting for a network."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.model.hub import check_hub_model, fetch_config, fetch_weights
from tunebook.model.load import check_model

MODEL = ModelConfig(name="organization/name", revision="abc")


class OutOfReach:
    """`HfApi` without a network."""

    def model_info(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("[Errno -2] Name or service not known")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in the cache that the hub's library returns."""

    def snapshot(name: str, **options: Any) -> str:
        assert (name, options["revision"]) == ("organization/name", "abc")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "HfApi", OutOfReach)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_weights_in_the_cache_need_no_hub(cached: Path) -> None:
    (cached / "model.safetensors").touch()
    check_hub_model(MODEL)


def test_a_cache_without_the_weights_is_not_enough(cached: Path) -> None:
    assert fetch_config(MODEL) == cached
    with pytest.raises(RequestError, match=r"out of reach.*model\.name=null model\.path=DIR.*HF_HUB_OFFLINE=1"):
        check_model(MODEL)
    check_model(ModelConfig(name="organization/name", weights=Weights.random))
    (cached / "model-00001-of-00002.safetensors").touch()
    places = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (cached / "model.safetensors.index.json").write_text(json.dumps(places))  # one of two shards
    with pytest.raises(RequestError, match=r"out of reach"):
        check_model(MODEL)


def test_full_disk_during_a_download_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    for fetch in (fetch_config, fetch_weights):
        with pytest.raises(
            DoesNotFitError, match=r"no space is left for the model 'organization/name'.*HF_HOME=FOLDER"
        ):
            fetch(MODEL)
