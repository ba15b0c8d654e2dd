from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tunebook import files
from tunebook.files import cache_root, remembered_hash, remembered_hashes


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were really read."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    seen: list[Path] = []

    def hash_and_tell(path: Path) -> str:
        seen.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(files, "sha256_file", hash_and_tell)
    return seen


def settle(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute pass: what changed just now is never remembered."""
    later = time.time_ns() + 60_000_000_000
    monkeypatch.setattr(files.time, "time_ns", lambda: later)
    assert file.stat().st_mtime_ns < later


def test_a_file_that_did_not_change_is_read_once(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    settle(file, monkeypatch)
    assert remembered_hash(file) == remembered_hash(file) == hashlib.sha256(b"one").hexdigest()
    assert reads == [file]


def test_changed_content_of_the_same_size_and_time_is_noticed(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    settle(file, monkeypatch)
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


def test_a_broken_or_unwritable_memory_does_no_harm(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    settle(file, monkeypatch)
    cache_root().mkdir()
    (cache_root() / "file_hashes.json").write_text("{broken")
    assert remembered_hash(file) == remembered_hash(file) == hashlib.sha256(b"one").hexdigest()
    assert reads == [file]
    monkeypatch.setenv("TUNEBOOK_CACHE", str(file / "below-a-file"))
    assert remembered_hash(file) == hashlib.sha256(b"one").hexdigest()


def test_each_way_of_hashing_remembers_its_own(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text(file.name)
        settle(file, monkeypatch)
    asked: list[Path] = []

    def first_letter(path: Path) -> str:
        asked.append(path)
        return path.read_text()[0]

    for _ in range(2):
        assert remembered_hashes(files, first_letter, "letters:") == dict(zip(files, "ab", strict=True))
        assert remembered_hash(files[0]) == hashlib.sha256(b"a").hexdigest()
    assert (asked, reads) == (files, files[:1])
