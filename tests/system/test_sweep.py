"""A real sweep: four trials of which two cannot be trained, a ranked table, and a file of it."""

from __future__ import annotations

import csv
import json
import shutil


def test_a_failing_trial_stops_no_other(run, project_root, tmp_path):
    good = project_root / "recipes" / "quickstart" / "model"
    wild = tmp_path / "wild"
    shutil.copytree(good, wild)
    config = json.loads((wild / "config.json").read_text())
    (wild / "config.json").write_text(json.dumps(config | {"initializer_range": 1e30}))  # its loss is not finite
    outputs = tmp_path / "outputs"
    overrides = f"model.path={good},{wild} training.seed=0,1 training.max_steps=3 evaluation=none outputs={outputs}"
    ended = run(["make", "sweep", f"ARGS={overrides}"], timeout_s=300)

    assert "Error 7" in ended.output, ended.output  # what make makes of the exit code
    assert f"trial 4 of 4: model.path={wild} training.seed=1" in ended.output
    assert "ranked by final loss" in ended.output
    assert "Traceback" not in ended.output
    (folder,) = (outputs / "quickstart").glob("sweep-*")
    with (folder / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["rank"] for line in lines] == ["1", "2", "", ""]
    assert [line["model.path"] for line in lines] == [str(good), str(good), str(wild), str(wild)]
    assert {line["training.seed"] for line in lines[:2]} == {"0", "1"}
    assert [line["exit_code"] for line in lines] == ["0", "0", "7", "7"]
    assert float(lines[0]["final_loss"]) <= float(lines[1]["final_loss"])
    assert all("not finite at step" in line["how_it_ended"] for line in lines[2:])
    assert all((folder / f"trial-{number:03d}" / "report.html").exists() for number in range(4))
