"""An unavailable hub model is refused early and without waiting for a network."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.model.hub import check_hub_model, fetch_config, fetch_weights, token_problem, unreadable_token
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


def test_a_repository_without_config_is_no_model(cached: Path) -> None:
    (cached / "config.json").unlink()
    with pytest.raises(RequestError, match=r"'organization/name' cannot be loaded: it has no config\.json"):
        fetch_config(MODEL)


def test_full_disk_during_a_download_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    for fetch in (fetch_config, fetch_weights):
        with pytest.raises(
            DoesNotFitError, match=r"no space is left for the model 'organization/name'.*HF_HOME=FOLDER"
        ):
            fetch(MODEL)


def test_a_token_that_cannot_be_read_is_named_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    with pytest.raises(RequestError, match=rf"{tmp_path}, where .* is a folder; type: rm -r {tmp_path}, then hf auth"):
        fetch_config(MODEL)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the hub's token, which does not exist."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "token"


def is_folder(file: Path) -> None:
    file.mkdir()


def is_not_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")


def test_readable_or_missing_token_is_no_problem(file: Path) -> None:
    assert unreadable_token() is None
    file.write_text("hf_secret")
    assert unreadable_token() is None


@pytest.mark.parametrize(("make", "kind"), [(is_folder, "is a folder"), (is_not_text, "is not text")])
def test_advice_for_a_folder_in_place_of_a_token(
    file: Path, make: Callable[[Path], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(file)
    problem = unreadable_token()
    assert problem is not None
    assert problem.what == f"{file}, where the hub's token is looked for, {kind}"
    assert problem.fix == f"rm -r {file}, then hf auth login; or HF_TOKEN in the environment"
    monkeypatch.setenv("HF_TOKEN_PATH", str(file))
    named = unreadable_token()
    assert named is not None
    assert "rm " not in named.fix and named.fix.startswith("unset HF_TOKEN_PATH")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")  # then the file is not read
    assert unreadable_token() is None


def test_a_file_of_somebody_else_and_one_below_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(huggingface_hub, "get_token", refuse)  # root may read everything
    problem = unreadable_token()
    assert problem is not None
    assert problem.what == f"the hub's token in {file} cannot be read: Permission denied"
    assert problem.fix.startswith(f"sudo chown $(id -u) {file} && chmod 600 {file}; ")
    monkeypatch.setattr("os.access", lambda path, mode: path != file.parent)
    closed = unreadable_token()
    assert closed is not None
    assert "chown" not in closed.fix and closed.fix.startswith("HF_HOME=FOLDER in front of the command")
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/dev/null/token")
    below = unreadable_token()
    assert below is not None
    assert below.what == "the hub's token in /dev/null/token cannot be read: Not a directory"


def test_other_errors_do_not_blame_the_token(file: Path) -> None:
    file.mkdir()
    assert token_problem(IsADirectoryError(errno.EISDIR, "Is a directory", "/another/place")) is None
    assert token_problem(ValueError("no")) is None
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = IsADirectoryError(errno.EISDIR, "Is a directory", str(file))
    assert token_problem(wrapped) == unreadable_token() is not None
