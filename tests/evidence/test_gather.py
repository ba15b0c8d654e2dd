"""The sections of evidence, read from a run's folder, and runs that are unfinished or were changed since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.gather import RunFacts, read_facts, read_finished, training_overrides
from tunebook.files import sha256_file
from tunebook.record.manifest import RunState, finish_manifest
from tunebook.record.run_record import RunRecord

from .conftest import MakeRun


def run_of(config: RunConfig, manifest: dict[str, Any]) -> RunFacts:
    return RunFacts(record=RunRecord(folder=Path("/x"), training=[{"step": 3}]), config=config, manifest=manifest)


def test_a_slice_of_a_model_is_called_one() -> None:
    words = ["model.facts.num_layers=4", "model.facts.num_parameters=200000000", "outputs=/x", "training.max_steps=3"]
    config = compose("qwen05b_single", words).config
    ran = run_of(config, {"command": ["tunebook", "train", "qwen05b_single", *words]}).description([])
    assert (ran.layers, ran.weights, ran.data) == ("4 of 24", "pretrained", "real")
    assert ran.overrides == [*words[:2], "training.max_steps=3"]


def test_a_slice_in_a_recipe_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "thin.yaml").write_text(
        "# @package _global_\ndefaults: [qwen05b_single, _self_]\ntitle: thin\nmodel: {facts: {num_layers: 6}}\n"
    )
    config = compose("thin", [], [tmp_path]).config
    manifest = {"command": ["tunebook", "train", "thin", "--recipes-dir", str(tmp_path)]}
    ran = run_of(config, manifest).description([tmp_path])
    assert (ran.recipe, ran.layers, ran.overrides) == ("thin", "6 of 24", [])


def test_a_claim_has_the_launcher_but_neither_the_cluster_nor_the_place_of_results() -> None:
    words = ["launcher=slurm", "launcher.partition=of_mine", "training.seed=1"]
    others = ["outputs=/x", "tracking=none", "training.resume=auto", "--run-folder", "rf=1,x", "--recipes-dir=a=b"]
    manifest = {"command": ["tunebook", "train", "quickstart", *words, *others]}
    assert run_of(plain_config(), manifest).description([]).overrides == ["launcher=slurm", "training.seed=1"]
    assert training_overrides(manifest) == words, "to start the same again"


@pytest.mark.parametrize(("source", "is_recorded"), [("estimated", True), ("measured", False)])
def test_a_plan_by_measured_steps_is_no_evidence_of_the_estimate(
    make_run: MakeRun, source: str, is_recorded: bool
) -> None:
    file = make_run(gpus=1) / "plan.json"
    file.write_text(json.dumps({"memory_gib": {"allocated": 9.5}, "memory_source": source}))
    assert read_facts(file.parent).results.planned_memory_gib == (9.5 if is_recorded else None)


def test_a_score_comes_with_that_of_clean_items(make_run: MakeRun) -> None:
    file = make_run() / "evaluation" / "after.json"
    record = json.loads(file.read_text())
    counts = {"num_items": 9, "num_exact": 2, "num_overlapping": 1, "num_shared_passage": 0, "num_clean": 6}
    scores = {"clean": {"value": 0.5, "stderr": 0.2, "num_items": 6}}
    record["contamination"] = {"not_checked": None, "tasks": {"words": {**counts, "scores": scores}}}
    file.write_text(json.dumps(record))
    found = read_facts(file.parents[1]).results.scores["words"].contamination
    assert found == {**counts, "value": 0.5, "stderr": 0.2}


def test_preferences_have_the_share_of_held_out_pairs_that_are_right(make_run: MakeRun) -> None:
    counts = {"validation": {"num_documents": 100}}
    changed = {"dataset": {"records": [], "fingerprint": "4" * 64, "content_sha256": "3" * 64, "counts": counts}}
    run = make_run("method=dpo", validation={30: 0.6, 60: 0.5}, manifest=changed)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"validation_reward_accuracy": line["step"] / 100} if "validation_loss" in line else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = read_facts(run).results.scores["validation_reward_accuracy"]
    assert (score.value, score.num_items) == (0.6, 100)
    assert score.stderr == pytest.approx(0.049, abs=1e-4)


def test_an_unfinished_run_is_refused_and_can_be_resumed(make_run: MakeRun) -> None:
    run = make_run(manifest={"status": {"state": "stopped", "reason": "stopped by SIGTERM"}})
    with pytest.raises(RequestError, match=r"\(stopped: stopped by SIGTERM\); name a run that has, or resume"):
        read_finished(run)


def test_a_run_without_a_finite_loss_is_refused(make_run: MakeRun) -> None:
    run = make_run(losses=[None] * 60)
    with pytest.raises(RequestError, match=r"no finite loss at a multiple of training\.log_every_steps=1"):
        assert read_finished(run).results


def test_an_edited_configuration_is_refused(make_run: MakeRun) -> None:
    run = make_run(replaced={"learning_rate: 0.0012": "learning_rate: 0.0013"})
    read_finished(run)
    text = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(text.replace("learning_rate: 0.0013", "learning_rate: 0.0014"))
    with pytest.raises(RequestError, match=r"run\.yaml was changed after the run") as error:
        read_finished(run)
    assert error.value.problem_id == "run-changed"


def test_edited_results_are_refused(make_run: MakeRun) -> None:
    run = make_run()
    finish_manifest(run, RunState.finished, 0, step=60)
    noted = json.loads((run / "manifest.json").read_text())["files_sha256"]
    assert noted == {name: sha256_file(run / name) for name in ("metrics.jsonl", "evaluation/after.json")}
    (run / "evaluation" / "eval-2026-11-21T10-00-00Z.json").write_text('{"tasks": {}}')  # by `tunebook eval`, later
    read_finished(run)
    for name in noted:
        (run / name).write_bytes((run / name).read_bytes().replace(b"6.1", b"5.1").replace(b"0.9", b"1.0"))
    with pytest.raises(RequestError, match=r"metrics\.jsonl and evaluation/after\.json was changed") as error:
        read_finished(run)
    assert error.value.problem_id == "run-changed"
