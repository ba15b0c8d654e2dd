"""What rank 0 records of a training: start-up phases, processor, waits for a core, and compiled graphs."""

from __future__ import annotations

import json

import pytest
from trl import SFTTrainer

from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.record.start_up import StartClock, note_launch
from tunebook.train import callbacks

PHASES = ["launch", "data", "model", "join_ranks", "weights", "trainer", "wrap", "checks", "first_step"]


def test_a_run_tells_the_phases_of_its_start(config, run, changed, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    start_manifest(folder, config, world_size=1, command=["tunebook"])
    note_launch(folder, StartClock())
    _, code, _ = run(changed(config, training={"max_steps": 4}))  # three steps an epoch
    assert code == 0
    found = read_manifest(folder)["start_up"]
    assert list(found["rank"]) == PHASES
    assert found["rank"]["first_step"] > 0
    assert abs(found["first_step_s"] - sum(found["rank"].values())) < 0.001 * len(PHASES)


def test_trackers_and_checkpoints_get_the_numbers_of_the_metrics(config, run, changed, monkeypatch):
    """An epoch has steps of 6, 6 and 4 documents. Upstream's has all six steps."""
    logged, log = [], SFTTrainer.log

    def kept(self, logs, start_time=None):
        log(self, logs, start_time)
        logged.append(dict(logs))

    monkeypatch.setattr(SFTTrainer, "log", kept)
    training = {"save_every_steps": 3, "evaluate_every_steps": 3, "global_samples": 6}
    config = changed(config, dataset={"validation_share": 0.25}, training=training)
    folder, code, lines = run(config)
    assert code == 0
    steps, validations = ([entry for entry in logged if key in entry] for key in ("loss", "eval_validation_loss"))
    trained, validated = ([line for line in lines if key in line] for key in ("loss", "validation_loss"))
    assert [entry["epoch"] for entry in steps] == [0.375, 0.75, 1.0, 1.375, 1.75, 2.0]
    for line, entry in zip(trained, steps, strict=True):
        assert entry["memory_gib"] == line["memory_gib"][0] > 0
        numbers = {key: line[key] for key in line.keys() - {"step", "memory_gib"} if line[key] is not None}
        assert numbers.items() <= entry.items()
        assert numbers.keys() >= {"tokens_seen", "documents_seen", "tokens_per_second_per_gpu", "seconds"}
        assert all(isinstance(value, int | float) for value in entry.values())
        assert 0 < entry["entropy"] < 10 and 0 <= entry["mean_token_accuracy"] <= 1
    assert [(entry["epoch"], entry["eval_validation_loss"]) for entry in validations] == [
        (epoch, line["validation_loss"]) for epoch, line in zip((1.0, 2.0), validated, strict=True)
    ]
    assert logged[-1]["epoch"] == 2.0
    assert "train_samples_per_second" not in logged[-1]  # upstream's are rows
    state = json.loads((folder / "checkpoints" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["epoch"] == 2.0
    assert [{key: entry[key] for key in entry if key != "step"} for entry in state["log_history"]] == logged[:-1]


@pytest.mark.parametrize(
    ("graphs", "expected"),
    [([2, 3], {"graphs": 3, "after_first_step": 1, "seconds": 3.0}), ([0, 0], None)],
)
def test_graphs_that_are_compiled_in_mid_run_are_told_apart(
    config, run, changed, tmp_path, monkeypatch, graphs, expected
):
    folder = tmp_path / "run"
    folder.mkdir()
    start_manifest(folder, config, world_size=1, command=["tunebook"])
    counts = iter(graphs)  # after the first step and at the end
    monkeypatch.setattr(callbacks, "compiled_graphs", lambda: ((count := next(counts)), float(count)))
    _, code, _ = run(changed(config, training={"max_steps": 2}))
    assert code == 0
    assert read_manifest(folder).get("compiled") == expected


def test_a_compiled_graph_is_counted(own_compiler):
    import torch

    before, seconds = callbacks.compiled_graphs()
    torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.zeros(2))
    after, later = callbacks.compiled_graphs()
    assert after == before + 1
    assert later > seconds
