from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunebook.errors import DataError
from tunebook.files import (
    atomic_write_json,
    atomic_write_text,
    read_json,
    sha256_file,
    sha256_text,
)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    atomic_write_text(file, "old")

    def crash(descriptor: int) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="went away"):
        atomic_write_text(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_json_refuses_numbers_that_are_not_finite_and_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    atomic_write_json(file, {"loss": 1.5, "word": "Größe"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic_write_json(file, {"loss": float("nan")})
    assert read_json(file) == {"loss": 1.5, "word": "Größe"}


def test_files_are_readable_by_whom_the_umask_says(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        atomic_write_text(tmp_path / "report.html", "page")
    finally:
        os.umask(mask)
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644


def test_a_broken_json_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(DataError, match=r"plan\.json is not JSON .*line 2"):
        read_json(tmp_path / "plan.json")


def test_hashes_are_sha256(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_file(tmp_path / "empty") == sha256_text("") == empty
