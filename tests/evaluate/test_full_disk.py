"""Which disk is full where an evaluation writes to several, and what helps there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tunebook.evaluate.full_disk import full_disk


@pytest.mark.parametrize(
    ("fullest", "helps"),
    [
        ("results", "free some space, then the same command takes the tasks that are finished"),
        ("temporary", "free some space or use another disk, TMPDIR=FOLDER in front of the command"),
        ("hub", "free some space or use another disk, HF_HOME=FOLDER in front of the command"),
    ],
)
def test_the_disk_with_the_least_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fullest: str, helps: str
) -> None:
    for name in ("results", "temporary", "hub"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(folder.name != fullest)))
    error = full_disk(tmp_path / "results", "the same command")
    assert (error.exit_code, error.problem_id) == (3, "disk-full")
    assert f"the disk of {tmp_path / fullest}, or a quota on it, is full" in error.message
    assert helps in error.message
