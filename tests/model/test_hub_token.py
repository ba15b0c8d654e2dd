"""A token's file that cannot be read is told from other failures, with what to type."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tunebook.model.hub_token import token_problem, unreadable_token


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hub's library looks for the token; nothing is there."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "token"


def is_folder(file: Path) -> None:
    file.mkdir()


def is_not_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")


def test_what_can_be_read_or_is_not_there_is_no_problem(file: Path) -> None:
    assert unreadable_token() is None
    file.write_text("hf_secret")
    assert unreadable_token() is None


@pytest.mark.parametrize(("make", "kind"), [(is_folder, "is a folder"), (is_not_text, "is not text")])
def test_what_is_no_token_is_removed_unless_the_user_named_it(
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


def test_only_an_error_of_the_token_is_put_down_to_it(file: Path) -> None:
    file.mkdir()
    assert token_problem(IsADirectoryError(errno.EISDIR, "Is a directory", "/another/place")) is None
    assert token_problem(ValueError("no")) is None
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = IsADirectoryError(errno.EISDIR, "Is a directory", str(file))
    assert token_problem(wrapped) == unreadable_token() is not None
