"""The phases of a start: they add up to the elapsed time and are in the run's manifest."""

from __future__ import annotations

import time
from pathlib import Path

from tunebook.record import start_up
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.record.start_up import StartClock, launch_time, note_first_step, note_launch


def test_launcher_and_rank_add_up_to_the_first_step(run_config, monkeypatch, tmp_path: Path) -> None:
    start_manifest(tmp_path, run_config, world_size=1, command=["tunebook"])
    launcher = StartClock(1000.0)
    monkeypatch.setattr(time, "time", lambda: 1002.0)
    launcher.passed("plan")
    note_launch(tmp_path, launcher)
    noted = read_manifest(tmp_path)["start_up"]
    assert (noted["launcher"], noted["rank"], noted["first_step_s"]) == ({"plan": 2.0}, {}, None)
    launched = start_up.datetime.fromisoformat(noted["launched"]).timestamp()
    assert launch_time(tmp_path) == launched
    rank = StartClock(launched + 3.0)
    monkeypatch.setattr(time, "time", lambda: launched + 7.5)
    rank.passed("model")
    note_first_step(tmp_path, rank)
    noted = read_manifest(tmp_path)["start_up"]
    assert noted["rank"] == {"launch": 3.0, "model": 4.5}
    assert list(noted["rank"]) == ["launch", "model"]
    assert noted["first_step_s"] == 2.0 + 3.0 + 4.5
    note_launch(tmp_path, launcher)  # another attempt at the same run
    assert read_manifest(tmp_path)["start_up"]["rank"] == {}
