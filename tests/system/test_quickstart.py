"""The main job as a new user does it: `make train`, then what it leaves."""

from __future__ import annotations

import json
import re

import pytest

NUM_STEPS = 1250


def score(folder, when):
    record = json.loads((folder / "evaluation" / f"{when}.json").read_text())
    return record["tasks"]["quickstart"]["value"]


def test_it_learns(quickstart):
    assert score(quickstart.folder, "before") <= 0.05
    assert score(quickstart.folder, "after") >= 0.90


def test_nothing_half_made_is_left(quickstart):
    names = {name for name in quickstart.left if not name.startswith(".")}
    assert names == {"run.yaml", "architecture.json", "plan.json", "prepared.json", "manifest.json", "metrics.jsonl",
                     "contamination.json", "evaluation", "model", "checkpoints", "log.txt", "outcome-0.json",
                     "report.html"}  # fmt: skip
    assert (quickstart.folder.parent / "latest").resolve() == quickstart.folder


@pytest.mark.browser
def test_a_browser_shows_both_scores_and_the_curves(quickstart, open_page, tmp_path):
    picture = tmp_path / "report.png"
    dom = open_page(quickstart.folder / "report.html", f"--screenshot={picture}", "--window-size=1100,3000")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", dom))
    before, after = score(quickstart.folder, "before"), score(quickstart.folder, "after")
    assert re.search(rf"quickstart exact.match .*{100 * before:.1f} % .*{100 * after:.1f} %", text), text[:3000]
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
