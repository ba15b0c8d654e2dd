from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tunebook import files
from tunebook.errors import DataError
from tunebook.files import (
    atomic_write_json,
    atomic_write_text,
    read_json,
    remembered_hash,
    sha256_file,
    sha256_text,
)


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_broken_json_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(DataError, match=r"plan\.json is not JSON .*line 2"):
        read_json(tmp_path / "plan.json")


def test_hashes_are_sha256(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_file(tmp_path / "empty") == sha256_text("") == empty


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose content was read."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    seen: list[Path] = []

    def hash_and_tell(path: Path) -> str:
        seen.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(files, "sha256_file", hash_and_tell)
    return seen


def settle(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a minute has passed, since hashes of fresh files are not cached."""
    later = time.time_ns() + 60_000_000_000
    monkeypatch.setattr(files.time, "time_ns", lambda: later)
    assert file.stat().st_mtime_ns < later


@pytest.fixture
def file(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with "one" in it, written a minute ago."""
    written = tmp_path / "a.jsonl"
    written.write_text("one")
    settle(written, monkeypatch)
    return written


def test_a_file_that_did_not_change_is_read_once(file: Path, reads: list[Path]) -> None:
    assert remembered_hash(file) == remembered_hash(file) == hashlib.sha256(b"one").hexdigest()
    assert reads == [file]


def test_changed_content_of_the_same_size_and_time_is_noticed(file: Path) -> None:
    remembered_hash(file)
    times = file.stat()
    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert remembered_hash(file) == hashlib.sha256(b"two").hexdigest()


def test_a_file_written_just_now_is_read_again(tmp_path: Path, reads: list[Path]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    remembered_hash(file)
    remembered_hash(file)
    assert reads == [file, file]
