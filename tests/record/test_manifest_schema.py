"""The manifest's schema: written manifests are valid, and an error names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.config.compose import compose
from tunebook.errors import DataError
from tunebook.record.manifest import RunState, check_manifest, finish_manifest, start_manifest, update_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    return start_manifest(tmp_path, compose("quickstart", []).config, world_size=1, command=["tunebook"])


def test_written_manifest_is_valid(manifest: dict[str, Any], tmp_path: Path) -> None:
    update_manifest(tmp_path, {"leak_probe": {"checked": False}, "hardware": {"nccl": "2.28.9"}})
    finish_manifest(tmp_path, RunState.failed, 1, "it failed", step=3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": "forty"}, "seed"),
        ({"world_size": 0}, "world_size"),
        ({"status": {"state": "runing"}}, "status.state"),
        ({"code": {"git_comit": "a"}}, "code.git_comit"),
        ({"hardware": {"gpus": [{"name": "H200"}]}}, "hardware.gpus.0.memory_gib"),
    ],
)
def test_invalid_key_is_named_and_nothing_is_written(
    manifest: dict[str, Any], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    before = (tmp_path / "manifest.json").read_text()
    with pytest.raises(DataError) as caught:
        update_manifest(tmp_path, changes)
    assert caught.value.problem_id == "broken-record"
    assert f": {named}: " in caught.value.message
    assert (tmp_path / "manifest.json").read_text() == before


def test_a_section_that_is_missing_is_named(manifest: dict[str, Any], tmp_path: Path) -> None:
    del manifest["environment"]
    with pytest.raises(DataError, match="environment: Field required"):
        check_manifest(manifest, tmp_path / "manifest.json")
