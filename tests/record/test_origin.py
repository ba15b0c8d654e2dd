from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError
from tunebook.record.manifest import start_manifest
from tunebook.record.origin import ORIGIN_FILE, origin_of, read_origin, write_origin


@pytest.fixture
def run(tmp_path: Path, run_config: RunConfig) -> Path:
    folder = tmp_path / "example" / "2026-01-02T03-04-05Z"
    folder.mkdir(parents=True)
    run_config.dataset.system_prompt = "Be short."
    (folder / "run.yaml").write_text(config_to_yaml(run_config))
    start_manifest(folder, run_config, world_size=1, command=["tunebook"], tokenizer_sha256="abc")
    return folder


def test_an_exported_folder_says_what_its_run_recorded(run: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    assert read_origin(exported) is None
    written = origin_of(run)
    write_origin(exported, written)
    manifest = json.loads((run / "manifest.json").read_text())
    assert written == read_origin(exported)
    assert written.run == "example/2026-01-02T03-04-05Z"
    assert (written.recipe, written.system_prompt) == (manifest["recipe"], "Be short.")
    assert (written.tokenizer_sha256, written.chat_template_sha256) == ("abc", None)
    assert written.config_sha256 == manifest["config_sha256"]


@pytest.mark.parametrize("change", [{"format": 2}, {"run": ...}, []])
def test_another_file_of_that_name_is_an_error(
    run: Path, tmp_path: Path, change: dict[str, object] | list[int]
) -> None:
    write_origin(tmp_path, origin_of(run))
    said = json.loads((tmp_path / ORIGIN_FILE).read_text())
    said = {key: value for key, value in (said | change).items() if value is not ...} if change else []
    (tmp_path / ORIGIN_FILE).write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"is not what `tunebook export` writes.*or remove the file") as raised:
        read_origin(tmp_path)
    assert raised.value.problem_id == "broken-record"


def test_a_folder_of_before_the_base_was_recorded_is_read_without(run: Path, tmp_path: Path) -> None:
    write_origin(tmp_path, origin_of(run))
    said = json.loads((tmp_path / ORIGIN_FILE).read_text())
    del said["weights_fingerprint"]
    (tmp_path / ORIGIN_FILE).write_text(json.dumps(said))
    read = read_origin(tmp_path)
    assert read is not None and read.weights_fingerprint is None
