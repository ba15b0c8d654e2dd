"""Recorded overrides whose meaning has changed, and the command that checks a claim."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tunebook.commands import typed_command
from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.typed_command import command_of
from tunebook.config.choices import LauncherName
from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.evidence.compare import input_differences
from tunebook.evidence.files import evidence_files, read_evidence
from tunebook.evidence.gather import read_finished

from ..evidence.conftest import MakeRun

LLAMA2 = "llama2_70b_fsdp/evidence/hopper-4-random_weights_8_layers"


def forget_words(run: Path) -> Path:
    """Evidence of a time when the recipe contained these overrides."""
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"command": ["tunebook", "train", "quickstart"]}))
    return run


def test_overrides_with_another_meaning_now_are_refused(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [forget_words(make_run("optimizer.learning_rate=3e-4")) for _ in range(2)]
    with pytest.raises(RequestError, match=r"`tunebook train quickstart` composes to another run now: ") as raised:
        record_evidence([read_finished(run) for run in runs], "try", [])
    assert (
        "optimizer.learning_rate is 0.0012, recorded with 0.0003. The recipe, or a file that it reads"
        in raised.value.message
    )
    assert raised.value.problem_id == "evidence-of-changed-code"
    assert evidence_files("quickstart", []) == []


def test_overrides_that_no_longer_compose_are_refused(make_run: MakeRun, recipes_dir: Path) -> None:
    records = [read_finished(make_run("training.max_steps=6")) for _ in range(2)]
    for record in records:
        assert record.manifest is not None
        record.manifest["command"].append("training.gone=1")
    with pytest.raises(
        RequestError, match=r"train quickstart .*` does not compose any more \(.*training\.gone.*\)\. The recipe"
    ):
        record_evidence(records, "try", [])


def test_overrides_with_the_same_meaning_are_accepted(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [make_run("training.max_steps=6", "launcher=local") for _ in range(2)]
    found = read_evidence(record_evidence([read_finished(run) for run in runs], "try", []))
    assert found.ran.overrides == ["training.max_steps=6", "launcher=local"]


def test_relative_paths_start_where_they_were_typed(
    make_run: MakeRun, recipes_dir: Path, project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project_root / "recipes/quickstart/model", tmp_path / "work" / "mine")
    monkeypatch.chdir(tmp_path / "work")
    words = ["model=hub", "model.path=mine", "model.weights=random"]
    records = [read_finished(make_run(*words)) for _ in range(2)]
    monkeypatch.chdir(tmp_path)  # where no model is that `auto` could read
    assert read_evidence(record_evidence(records, "try", [])).ran.overrides == words


def test_missing_folder_of_relative_paths_is_named(
    make_run: MakeRun, recipes_dir: Path, project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project_root / "recipes/quickstart/model", tmp_path / "work" / "mine")
    monkeypatch.chdir(tmp_path / "work")
    records = [read_finished(make_run("model=hub", "model.path=mine", "model.weights=random")) for _ in range(2)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").rename(tmp_path / "moved")
    said = (
        rf"\. {re.escape(str(tmp_path))}/work, where it was typed, does not exist, so relative paths start here\. The"
    )
    with pytest.raises(RequestError, match=said):
        record_evidence(records, "try", [])


@pytest.mark.parametrize("name", [LLAMA2, "dolly3b_ray_zero3_offload/evidence/hopper-1-random_weights"])
def test_what_ran_on_one_node_is_checked_without_the_recipes_cluster(project_root: Path, name: str) -> None:
    evidence = read_evidence(project_root / "recipes" / f"{name}.json")
    assert evidence.hardware.nodes == 1
    command = command_of(evidence, [])
    assert command is not None
    words = shlex.split(command)
    assert words[3:] == [*evidence.ran.overrides, "launcher=local"]
    assert compose(words[2], words[3:-1]).config.launcher.name is not LauncherName.local
    assert compose(words[2], words[3:]).config.launcher.name is LauncherName.local


def test_typed_launcher_and_several_nodes_are_kept(project_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = read_evidence(project_root / f"recipes/{LLAMA2}.json")
    monkeypatch.setattr(typed_command, "config_differences", lambda *_: [])
    on_two = evidence.model_copy(update={"hardware": evidence.hardware.model_copy(update={"nodes": 2})})
    assert "launcher" not in str(command_of(on_two, []))
    ran = evidence.ran.model_copy(update={"overrides": [*evidence.ran.overrides, "launcher=slurm"]})
    assert str(command_of(evidence.model_copy(update={"ran": ran}), [])).endswith("launcher=slurm")


def test_location_of_known_weights_is_no_difference(make_run: MakeRun) -> None:
    run = make_run()
    inputs = read_finished(run).inputs
    here, there = (
        inputs.model_copy(
            update={
                "config": inputs.config | {"model": inputs.config["model"] | {"path": path, "weights": "pretrained"}},
                "weights_fingerprint": "a" * 64,
            }
        )
        for path in ("/here", "/there")
    )
    assert input_differences(here, there) == []
    unknown = there.model_copy(update={"weights_fingerprint": None})
    assert [key for key, *_ in input_differences(here, unknown)] == ["model.path"]
