"""The phases of a rank's start are in the manifest once its first step has ended, each once."""

from __future__ import annotations

from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.record.start_up import StartClock, note_launch

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
