from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.errors import DataError
from tunebook.files import sha256_file
from tunebook.record.manifest import (
    RunState,
    finish_manifest,
    read_manifest,
    start_manifest,
    state_of_exit_code,
    update_manifest,
)
from tunebook.record.run_folder import write_outcome
from tunebook.record.run_record import RunRecord


def start(folder: Path, config: RunConfig) -> dict[str, Any]:
    return start_manifest(
        folder, config, world_size=1, command=["/somewhere/bin/tunebook", "train", "example"],
        dataset={"records": [], "fingerprint": "abc"}, tokenizer_sha256="def",
    )  # fmt: skip


def test_manifest_describes_the_run(tmp_path: Path, run_config: RunConfig) -> None:
    manifest = start(tmp_path, run_config)
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"]["state"] == "running"
    assert manifest["model"]["name"] == "book:recipes/quickstart/model"
    assert manifest["model"]["weights"] == "random"
    assert len(manifest["model"]["config_sha256"]) == 64
    assert manifest["environment"]["packages"]["omegaconf"].startswith("2.3")
    assert manifest["hardware"]["cpus"] >= 1
    assert manifest["command"] == ["tunebook", "train", "example"]
    assert manifest["hardware"]["host"] != socket.gethostname()
    update_manifest(tmp_path, {"model": {"revision": "abc"}, "chat_template_sha256": "ghi"})
    manifest = read_manifest(tmp_path)
    assert (manifest["model"]["revision"], manifest["model"]["weights"]) == ("abc", "random")
    assert manifest["chat_template_sha256"] == "ghi"
    start(tmp_path, replace(run_config, model=replace(run_config.model, path=str(Path.home() / "models" / "mine"))))
    assert read_manifest(tmp_path)["model"]["name"] == "~/models/mine"


def test_an_end_has_its_reason_and_duration_and_earlier_attempts_are_kept(
    tmp_path: Path, run_config: RunConfig
) -> None:
    for attempt in range(2):
        start(tmp_path, run_config)
        finish_manifest(
            tmp_path, state_of_exit_code(7), 7, f"{attempt}", step=56, last_checkpoint="checkpoints/step-50"
        )
        status = read_manifest(tmp_path)["status"]
        assert (status["state"], status["exit_code"], status["step"]) == ("invalid", 7, 56)
        assert status["last_checkpoint"] == "checkpoints/step-50"
        assert status["started"] <= status["ended"]
        assert 0 <= status["seconds"] < 60
    manifest = start(tmp_path, run_config)
    assert [attempt["reason"] for attempt in manifest["earlier_attempts"]] == ["0", "1"]
    assert manifest["status"]["state"] == "running"


def test_the_end_takes_from_the_ranks_what_the_model_is_and_why_it_stopped_early(
    tmp_path: Path, run_config: RunConfig
) -> None:
    start(tmp_path, run_config)
    reason = "stopped early after step 6: no better validation loss in 1 evaluation; model/ is checkpoint-3 (10.1723)"
    write_outcome(tmp_path, rank=0, exit_code=0, reason=reason, step=6, best_step=3)
    status = finish_manifest(tmp_path, RunState.finished, 0, step=6)["status"]
    assert (status["reason"], status["step"], status["best_step"]) == (reason, 6, 3)
    stopped = finish_manifest(tmp_path, RunState.stopped, 6, "stopped before the evaluation", step=6)["status"]
    assert (stopped["reason"], stopped["best_step"]) == ("stopped before the evaluation", 3)
    write_outcome(tmp_path, rank=0, exit_code=0, reason="finished", step=54)
    status = finish_manifest(tmp_path, RunState.finished, 0, step=54)["status"]
    assert (status["reason"], status["best_step"]) == (None, None)


def test_hashes_of_results_are_recorded_at_the_end(tmp_path: Path, run_config: RunConfig) -> None:
    start(tmp_path, run_config)
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}\n")
    manifest = finish_manifest(tmp_path, RunState.stopped, 6, "asked to stop")
    assert manifest["files_sha256"] == {"metrics.jsonl": sha256_file(file)}
    assert RunRecord(folder=tmp_path, manifest=manifest).changed_files == []
    file.write_text("{ }\n")
    assert RunRecord(folder=tmp_path, manifest=manifest).changed_files == ["metrics.jsonl"]
    running = manifest | {"status": manifest["status"] | {"state": "running"}}
    assert RunRecord(folder=tmp_path, manifest=running).changed_files == []  # it has been taken up again and writes on
    assert "files_sha256" not in start(tmp_path, run_config)


@pytest.mark.parametrize("content", [None, '{"format": 99}'])
def test_a_missing_or_another_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json") as raised:
        read_manifest(tmp_path)
    assert raised.value.problem_id == "broken-record"


def test_fingerprint_of_weights_in_a_folder_is_recorded(tmp_path: Path, run_config: RunConfig) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "pytorch_model.bin").write_bytes(b"weights")
    run_config.model = ModelConfig(path=str(base), weights=Weights.pretrained)
    now = start(tmp_path, run_config)
    found = now["model"]["weights_fingerprint"]
    assert found is not None and len(found) == 64
    on_hub = start(tmp_path, replace(run_config, model=ModelConfig(name="org/model")))
    assert on_hub["model"]["weights_fingerprint"] is None
    kept = start_manifest(
        tmp_path, run_config, world_size=1, command=["tunebook"], model={"weights_fingerprint": "1" * 64}
    )
    assert kept["model"]["weights_fingerprint"] == "1" * 64
