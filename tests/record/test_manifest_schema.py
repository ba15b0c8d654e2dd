"""The manifest's schema: written manifests are valid, errors name the key, and the JSON schema file is up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.compose import compose
from tunebook.errors import DataError
from tunebook.record import manifest_schema
from tunebook.record.manifest import RunState, finish_manifest, start_manifest, update_manifest
from tunebook.record.manifest_schema import check_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    return start_manifest(tmp_path, compose("quickstart", []).config, world_size=1, command=["tunebook"])


def test_written_manifest_is_valid(manifest: dict[str, Any], tmp_path: Path) -> None:
    check_manifest(manifest)
    check_manifest(update_manifest(tmp_path, {"leak_probe": {"checked": False}, "hardware": {"nccl": "2.28.9"}}))
    check_manifest(finish_manifest(tmp_path, RunState.failed, 1, "it failed", step=3))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": "forty"}, "seed: Input should be a valid integer"),
        ({"world_size": 0}, "world_size: Input should be greater than or equal to 1"),
        ({"status": {"state": "runing"}}, "status.state: Input should be 'running', 'finished'"),
        ({"code": {"git_comit": "a"}}, "code.git_comit: Extra inputs are not permitted"),
        ({"hardware": {"gpus": [{"name": "H200"}]}}, "hardware.gpus.0.memory_gib: Field required"),
    ],
)
def test_invalid_key_is_named_and_nothing_is_written(
    manifest: dict[str, Any], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    before = (tmp_path / "manifest.json").read_text()
    with pytest.raises(DataError) as caught:
        update_manifest(tmp_path, changes)
    assert named in caught.value.message
    assert (tmp_path / "manifest.json").read_text() == before


def test_a_section_that_is_missing_is_named(manifest: dict[str, Any]) -> None:
    del manifest["environment"]
    with pytest.raises(DataError, match="environment: Field required"):
        check_manifest(manifest)


def test_json_schema_file_is_up_to_date() -> None:
    file = Path(manifest_schema.__file__).with_name("manifest.schema.json")
    schema = manifest_schema.Manifest.model_json_schema()
    assert json.loads(file.read_text()) == schema, f"write {file.name} again; its module says how"
