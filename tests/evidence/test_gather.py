"""Which overrides of a run are part of its claim, and how a slice of a model is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.gather import (
    RunFacts,
    claim_overrides,
    gather_results,
    read_finished,
    training_overrides,
)
from tunebook.record.run_record import RunRecord, read_run

from .conftest import MakeRun


def run_of(config: RunConfig, manifest: dict[str, Any]) -> RunFacts:
    return RunFacts(record=RunRecord(folder=Path("/x"), training=[{"step": 3}]), config=config, manifest=manifest)


def test_a_slice_of_a_model_is_called_one() -> None:
    words = ["model.facts.num_layers=4", "model.facts.num_parameters=200000000", "outputs=/x", "training.max_steps=3"]
    config = compose("qwen05b_single", words).config
    command = ["tunebook", "train", "qwen05b_single", *words]
    ran = run_of(config, {"command": command}).description([])
    assert (ran.layers, ran.weights, ran.data) == ("4 of 24", "pretrained", "real")
    assert ran.overrides == [*words[:2], "training.max_steps=3"]


def test_slice_in_a_user_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "thin.yaml").write_text(
        "# @package _global_\ndefaults: [qwen05b_single, _self_]\ntitle: thin\nmodel: {facts: {num_layers: 6}}\n"
    )
    config = compose("thin", [], [tmp_path]).config
    manifest = {"command": ["tunebook", "train", "thin", "--recipes-dir", str(tmp_path)]}
    ran = run_of(config, manifest).description([tmp_path])
    assert (ran.recipe, ran.layers, ran.overrides) == ("thin", "6 of 24", [])


def test_folder_name_that_looks_like_an_override_is_no_slice() -> None:
    command = ["tunebook", "train", "quickstart", "--run-folder", "rf=1,x", "--recipes-dir=a=b", "training.seed=1"]
    assert claim_overrides({"command": command}) == ["training.seed=1"]
    with pytest.raises(RequestError, match="has the command `tunebook reproduce run` and not the overrides"):
        claim_overrides({"command": ["tunebook", "reproduce", "run"]})


def test_claim_contains_the_launcher_but_not_the_cluster() -> None:
    words = ["launcher=slurm", "launcher.partition=of_mine", "training.seed=1"]
    manifest = {"command": ["tunebook", "train", "quickstart", *words, "outputs=/x", "tracking=none"]}
    assert claim_overrides(manifest) == ["launcher=slurm", "training.seed=1"]
    assert training_overrides(manifest) == words, "to start the same again"


@pytest.mark.parametrize(
    ("words", "going_on"),
    [
        ([], "that started it$"),
        (["training.resume=never"], "that started it, without training.resume=never$"),
    ],
)
def test_unfinished_run_names_the_command_to_resume(make_run: MakeRun, words: list[str], going_on: str) -> None:
    run = make_run(*words, manifest={"status": {"state": "stopped", "reason": "stopped by SIGTERM"}})
    with pytest.raises(RequestError, match=rf"stopped by SIGTERM\); name a run that has, .* command {going_on}"):
        read_finished(run)


@pytest.mark.parametrize(("source", "is_recorded"), [("estimated", True), ("measured", False), (None, True)])
def test_a_plan_by_measured_steps_is_no_evidence_of_the_estimate(
    make_run: MakeRun, source: str | None, is_recorded: bool
) -> None:
    file = make_run(gpus=1) / "plan.json"
    file.write_text(json.dumps({"memory_gib": {"allocated": 9.5}} | ({"memory_source": source} if source else {})))
    planned = gather_results(read_run(file.parent)).planned_memory_gib
    assert planned == (9.5 if is_recorded else None)


def test_a_score_comes_with_that_of_clean_items(make_run: MakeRun) -> None:
    file = make_run() / "evaluation" / "after.json"
    record = json.loads(file.read_text())
    [name] = record["tasks"]
    counts = {"num_items": 9, "num_exact": 2, "num_overlapping": 1, "num_shared_passage": 0, "num_clean": 6}
    scores = {"clean": {"value": 0.5, "stderr": 0.2, "num_items": 6}}
    record["contamination"] = {"not_checked": None, "tasks": {name: {**counts, "scores": scores}}}
    file.write_text(json.dumps(record))
    found = gather_results(read_run(file.parents[1])).scores[name].contamination
    assert found is not None
    assert found.model_dump() == {**counts, "value": 0.5, "stderr": 0.2}
    record["contamination"] = None
    file.write_text(json.dumps(record))
    assert gather_results(read_run(file.parents[1])).scores[name].contamination is None
