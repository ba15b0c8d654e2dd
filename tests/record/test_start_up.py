"""The phases of a start: they add up to the elapsed time and are in the run's manifest."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tunebook.record import start_up
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.record.start_up import StartClock, note_first_step, note_launch, process_begun


@pytest.fixture
def clock_at(monkeypatch):
    """Sets the time of all clocks, in seconds."""
    return lambda now: monkeypatch.setattr(time, "time", lambda: now)


def test_every_second_is_some_phases(clock_at) -> None:
    clock = StartClock(100.0)
    for now, phase in ((101.5, "plan"), (104.5, "data"), (104.75, "plan"), (104.0, "set_back")):
        clock_at(now)
        clock.passed(phase)
    assert clock.phases == {"plan": 1.75, "data": 3.0, "set_back": 0.0}


def test_launcher_and_rank_add_up_to_the_first_step(run_config, clock_at, tmp_path: Path) -> None:
    start_manifest(tmp_path, run_config, world_size=1, command=["tunebook"])
    launcher = StartClock(1000.0)
    clock_at(1002.0)
    launcher.passed("plan")
    note_launch(tmp_path, launcher)
    noted = read_manifest(tmp_path)["start_up"]
    assert (noted["launcher"], noted["rank"], noted["first_step_s"]) == ({"plan": 2.0}, {}, None)
    launched = start_up.datetime.fromisoformat(noted["launched"]).timestamp()
    rank = StartClock(launched + 3.0)
    clock_at(launched + 7.5)
    rank.passed("model")
    note_first_step(tmp_path, rank)
    noted = read_manifest(tmp_path)["start_up"]
    assert noted["rank"] == {"launch": 3.0, "model": 4.5}
    assert list(noted["rank"]) == ["launch", "model"]
    assert noted["first_step_s"] == 2.0 + 3.0 + 4.5
    note_launch(tmp_path, launcher)  # another attempt at the same run
    assert read_manifest(tmp_path)["start_up"]["rank"] == {}


def test_without_a_manifest_nothing_is_written(tmp_path: Path) -> None:
    note_launch(tmp_path, StartClock())
    note_first_step(tmp_path, StartClock())
    assert list(tmp_path.iterdir()) == []


def test_process_start_time_is_known() -> None:
    assert process_begun() == pytest.approx(psutil.Process().create_time(), abs=1.1)  # which counts seconds
