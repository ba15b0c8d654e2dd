"""`tunebook sweep launcher=slurm` on a real Slurm of two nodes: each trial submits its own job and waits for it."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

JOBS = ("launcher=slurm", "launcher.wait=true", "launcher.cpus_per_task=1", "hardware=cpu")


@pytest.fixture
def words_of(tmp_path):
    """A sweep of the quickstart that writes to the test's folder."""

    def words(*overrides):
        return [
            *["tunebook", "sweep", "quickstart", "evaluation=none", "schedule.warmup_steps=0", *JOBS],
            *["hardware.gpus_per_node=1", "training.max_steps=4", f"outputs={tmp_path}", *overrides],
        ]

    return words


def test_trials_are_jobs_and_a_failing_one_is_a_row(
    run, slurm, read_run, words_of, project_root, tmp_path, leaves_nothing
):
    good, wild = project_root / "recipes" / "quickstart" / "model", tmp_path / "wild"
    shutil.copytree(good, wild)
    config = json.loads((wild / "config.json").read_text())
    (wild / "config.json").write_text(json.dumps(config | {"initializer_range": 1e30}))  # its loss is not finite
    words = words_of(f"model.path={wild},{good}", "training.seed=0,1", "--jobs=2", "packing=padded")
    ended = run(words, 400, **slurm)
    assert ended.exit_code == 7, ended.output
    (folder,) = (tmp_path / "quickstart").glob("sweep-*")
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["exit_code"] for row in rows] == ["0", "0", "7", "7"]
    assert "not finite at step" in rows[2]["how_it_ended"]
    for number in (2, 3):
        finished = read_run(folder / f"trial-{number:03d}")
        assert (finished.status["state"], len(finished.losses)) == ("finished", 4)
        assert "name: slurm" in (finished.folder / "run.yaml").read_text()
    leaves_nothing(30)


def test_a_partition_that_does_not_exist_is_refused_before_anything_is_made(run, slurm, words_of, tmp_path):
    ended = run(words_of("training.seed=0,1", "launcher.partition=mian"), **slurm)
    assert ended.exit_code == 2, ended.output
    assert "Slurm refuses the job" in ended.output
    assert not (tmp_path / "quickstart").exists()
