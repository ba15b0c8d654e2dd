"""What rank 0 records of a training: start-up phases, processor, waits for a core, and compiled graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.record.metrics import read_metrics
from tunebook.record.provenance import describe_processor
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
    assert read_manifest(folder)["processor"] == describe_processor()


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the system does not count waits for a core")
def test_each_line_has_the_time_that_other_work_had_the_cores(config, run, changed, tmp_path):
    _, code, _ = run(changed(config, training={"max_steps": 4}))
    assert code == 0
    waits = [line["core_wait_seconds"] for line in read_metrics(tmp_path / "run")]
    assert len(waits) == 4
    assert all(wait >= 0 for wait in waits)


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
