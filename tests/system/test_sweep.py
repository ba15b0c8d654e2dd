"""Real sweeps: one with trials that cannot be trained, one side by side that is killed and resumes, and a search."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal

import pytest

SHORT = ("evaluation=none", "schedule.warmup_steps=0")


def rows_of(folder):
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_failing_trial_stops_no_other(run, project_root, tmp_path):
    good = project_root / "recipes" / "quickstart" / "model"
    wild = tmp_path / "wild"
    shutil.copytree(good, wild)
    config = json.loads((wild / "config.json").read_text())
    (wild / "config.json").write_text(json.dumps(config | {"initializer_range": 1e30}))  # its loss is not finite
    outputs = tmp_path / "outputs"
    overrides = f"model.path={wild},{good} training.max_steps=3 evaluation=none"
    overrides += f" packing=padded outputs={outputs}"  # in packed rows the leak probe ends such a model before step 1
    ended = run(["make", "sweep", f"ARGS={overrides}"], timeout_s=600)

    assert "Error 7" in ended.output, ended.output  # what make makes of the exit code
    assert f"trial 2 of 2: model.path={good}" in ended.output
    assert "ranked by final loss" in ended.output
    assert "Traceback" not in ended.output
    (folder,) = (outputs / "quickstart").glob("sweep-*")
    lines = rows_of(folder)
    assert [line["rank"] for line in lines] == ["1", ""]
    assert [line["model.path"] for line in lines] == [str(good), str(wild)]
    assert [line["exit_code"] for line in lines] == ["0", "7"]
    assert "not finite at step" in lines[1]["how_it_ended"]
    assert all((folder / f"trial-{number:03d}" / "report.html").exists() for number in range(2))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two trials at a time need two cores")
def test_trials_side_by_side_whose_sweep_is_killed_save_and_resume(start, run, read_run, tmp_path):
    # The first two are short; the others so long that one is at work yet when the other begins.
    words = [
        *["tunebook", "sweep", "quickstart", "training.max_steps=3,100", "training.seed=0,1", *SHORT],
        *[f"outputs={tmp_path}", "--jobs=2"],
    ]
    sweep = start(words)

    def losses(number):
        folders = list(tmp_path.glob(f"quickstart/sweep-*/trial-{number:03d}"))
        return len(read_run(folders[0]).losses) if folders else 0

    sweep.wait_for(lambda: losses(2) >= 3 and losses(3) >= 3, 600)
    (folder,) = (tmp_path / "quickstart").glob("sweep-*")
    records = {name: (folder / name).stat().st_mtime for name in ("trial-000/manifest.json", "trial-001/manifest.json")}
    # The input of its trials ends with it, which asks them to stop.
    os.kill(sweep.process.pid, signal.SIGKILL)
    sweep.process.wait()
    ended = run(words, timeout_s=600)
    assert ended.exit_code == 0, ended.output
    assert "2 of 4 trials to run" in ended.output
    assert [path.name for path in (tmp_path / "quickstart").glob("sweep-*")] == [folder.name]
    assert [line["exit_code"] for line in rows_of(folder)] == ["0"] * 4
    assert {name: (folder / name).stat().st_mtime for name in records} == records  # finished ones were left alone
    for number in (2, 3):
        assert len(read_run(folder / f"trial-{number:03d}").losses) == 100
        assert "resuming from" in (folder / f"trial-{number:03d}.log").read_text()


def test_a_search_learns_what_is_best_and_resumes_after_ctrl_c(start, run, tmp_path):
    words = [
        *["tunebook", "sweep", "quickstart", "optimizer.learning_rate=tag(log,interval(1e-5,1e-2))", *SHORT],
        *["training.max_steps=30", f"outputs={tmp_path}", "--num-trials=3"],
    ]
    sweep = start(words)
    sweep.wait_for(lambda: list(tmp_path.glob("quickstart/sweep-*/trial-001/metrics.jsonl")), 400)
    sweep.interrupt()
    stopped = sweep.wait(300)
    assert stopped.exit_code == 6, stopped.output
    assert "the same command resumes it" in stopped.output
    (folder,) = (tmp_path / "quickstart").glob("sweep-*")
    ended = run(words, timeout_s=600)
    assert ended.exit_code == 0, ended.output
    # One if the second took its last step before it heard of the request.
    assert any(f"{left} of 3 trials to run" in ended.output for left in (1, 2))
    lines = rows_of(folder)
    assert [line["rank"] for line in lines] == ["1", "2", "3"]
    losses = [float(line["final_loss"]) for line in lines]
    assert losses == sorted(losses)
    assert len({line["optimizer.learning_rate"] for line in lines}) == 3
    assert all(1e-5 <= float(line["optimizer.learning_rate"]) <= 1e-2 for line in lines)
    assert f"optimizer.learning_rate={lines[0]['optimizer.learning_rate']}" in ended.output.split("best: ")[1]
