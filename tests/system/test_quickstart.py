"""The main job as a new user does it: `make train`, then what it leaves."""

from __future__ import annotations

import json
import re
from datetime import datetime

import pytest

from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.identity import config_hash
from tunebook.record.metrics import read_metrics

NUM_STEPS = 1250


def score(folder, when):
    record = json.loads((folder / "evaluation" / f"{when}.json").read_text())
    return record["tasks"]["quickstart"]["value"]


def test_it_learns_and_memorising_would_not_do(quickstart):
    assert score(quickstart.folder, "before") <= 0.05
    assert score(quickstart.folder, "after") >= 0.90
    after = json.loads((quickstart.folder / "evaluation" / "after.json").read_text())
    assert after["baseline"]["value"] < 0.50


def test_the_terminal_says_what_was_chosen_how_far_it_is_and_what_came_out(quickstart):
    output = quickstart.ended.output
    for text in ("attention.implementation", "1,250 optimizer steps in all", "step 1/1250  loss ", "finished",
                 "quickstart (exact_match)", f"report: {quickstart.folder / 'report.html'}"):  # fmt: skip
        assert text in output, text
    assert "Traceback" not in output
    assert "Warning" not in output
    assert not re.search(r"\x1b|\r", output)  # nothing for terminals where there is none


def test_every_step_is_in_the_metrics(quickstart):
    lines = read_metrics(quickstart.folder)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    wanted = {"loss", "grad_norm", "learning_rate", "tokens_seen", "tokens_per_second_per_gpu", "padding_share", "mfu",
              "memory_gib"}  # fmt: skip
    assert all(wanted <= set(line) for line in lines)
    # an epoch of 15,000 documents is 938 steps, the last of 8; then 312 steps of 16
    assert lines[-1]["documents_seen"] == 15_000 + 312 * 16
    assert lines[-1]["loss"] < 0.2 < 3 < lines[0]["loss"]


def test_the_manifest_is_complete(quickstart):
    manifest = json.loads((quickstart.folder / "manifest.json").read_text())
    status = manifest["status"]
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, NUM_STEPS)
    assert datetime.fromisoformat(status["started"]) < datetime.fromisoformat(status["ended"])
    assert manifest["code"]["git_commit"]
    hashes = (manifest["config_sha256"], manifest["tokenizer_sha256"], manifest["chat_template_sha256"],
              manifest["model"]["config_sha256"])  # fmt: skip
    assert all(re.fullmatch(r"[0-9a-f]{64}", text) for text in hashes)
    assert manifest["environment"]
    assert manifest["dataset"]["counts"]["train"]
    assert (manifest["world_size"], manifest["seed"]) == (1, 0)
    assert manifest["command"][:3] == ["tunebook", "train", "quickstart"]
    started = manifest["start_up"]
    assert {"start_python", "plan", "data", "run_folder"} <= started["launcher"].keys()
    assert {"launch", "import_libraries", "model", "checks", "first_step"} <= started["rank"].keys()
    assert started["launcher"]["evaluation_before"] > 0
    phases = [*started["launcher"].values(), *started["rank"].values()]
    assert abs(started["first_step_s"] - sum(phases)) < 0.001 * len(phases)


def test_the_frozen_configuration_reads_back_as_it_was_run(quickstart):
    file = quickstart.folder / "run.yaml"
    config = load_config(file)
    assert config_to_yaml(config) == file.read_text()
    manifest = json.loads((quickstart.folder / "manifest.json").read_text())
    assert config_hash(config) == manifest["config_sha256"]


def test_nothing_half_made_is_left(quickstart):
    names = {name for name in quickstart.left if not name.startswith(".")}
    assert names == {"run.yaml", "architecture.json", "plan.json", "prepared.json", "manifest.json", "metrics.jsonl",
                     "contamination.json", "evaluation", "model", "checkpoints", "log.txt", "outcome-0.json",
                     "report.html"}  # fmt: skip
    assert (quickstart.folder.parent / "latest").resolve() == quickstart.folder


@pytest.mark.browser
def test_a_browser_shows_both_scores_the_baseline_and_the_curves(quickstart, open_page, tmp_path):
    picture = tmp_path / "report.png"
    dom = open_page(quickstart.folder / "report.html", f"--screenshot={picture}", "--window-size=1100,3000")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", dom))
    before, after = score(quickstart.folder, "before"), score(quickstart.folder, "after")
    assert re.search(rf"quickstart exact.match .*{100 * before:.1f} % .*{100 * after:.1f} %", text), text[:3000]
    assert "look-up" in text
    assert dom.count('<svg class="chart"') >= 4
    assert text.count("After training") == 5  # sample answers
    assert "attention.implementation" in text  # the choices and why
    assert picture.stat().st_size > 50_000


def test_a_run_can_be_evaluated_and_reported_again(quickstart, run):
    before = set((quickstart.folder / "evaluation").glob("eval-*[Z0-9].json"))  # other tests evaluate it too
    evaluated = run(["make", "eval", f"ARGS=--outputs {quickstart.outputs}"])
    assert evaluated.exit_code == 0, evaluated.output
    assert "written: " in evaluated.output
    (file,) = set((quickstart.folder / "evaluation").glob("eval-*[Z0-9].json")) - before
    again = json.loads(file.read_text())
    assert again["tasks"]["quickstart"]["value"] == score(quickstart.folder, "after")
    (quickstart.folder / "report.html").unlink()
    reported = run(["make", "report", f"ARGS=quickstart --outputs {quickstart.outputs}"])
    assert reported.exit_code == 0, reported.output
    assert "written: " in reported.output
    assert (quickstart.folder / "report.html").stat().st_size > 50_000
