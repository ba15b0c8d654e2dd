"""A hub model that cannot be had is refused before anything is made, and without waiting for a network."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.model.hub import check_hub_model, fetch_config, fetch_weights
from tunebook.model.load import check_model

MODEL = ModelConfig(name="organisation/name", revision="abc")


class OutOfReach:
    """What `HfApi` is without a network."""

    def model_info(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("[Errno -2] Name or service not known")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the hub's library answers with: the cache's copy."""

    def snapshot(name: str, **options: Any) -> str:
        assert (name, options["revision"]) == ("organisation/name", "abc")
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
    check_model(ModelConfig(name="organisation/name", weights=Weights.random))


def test_a_repository_without_config_is_no_model(cached: Path) -> None:
    (cached / "config.json").unlink()
    with pytest.raises(RequestError, match=r"'organisation/name' cannot be loaded: it has no config\.json"):
        fetch_config(MODEL)


def test_a_disk_that_fills_up_while_a_model_is_fetched_is_no_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    for fetch in (fetch_config, fetch_weights):
        with pytest.raises(
            DoesNotFitError, match=r"no space is left for the model 'organisation/name'.*HF_HOME=FOLDER"
        ):
            fetch(MODEL)


def test_a_token_that_cannot_be_read_is_named_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    with pytest.raises(RequestError, match=rf"{tmp_path}, where .* is a folder; type: rm -r {tmp_path}, then hf auth"):
        fetch_config(MODEL)
