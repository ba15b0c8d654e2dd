"""The start of a run on its page: every phase where it began, and nothing of a run that reached no step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.record.page.start import start_bars
from tunebook.record.report import write_report

START_UP = {
    "launched": "2026-11-21T07:18:07.000+00:00",
    "launcher": {"start_python": 1.0, "plan": 3.0},
    "rank": {"launch": 4.0, "model": 8.0, "a_later_phase": 0.0, "first_step": 4.0},
    "first_step_s": 20.0,
}


def test_phases_stand_one_after_the_other() -> None:
    bars, note = start_bars({"start_up": START_UP, "model": {"weights": "random"}})
    assert [(bar.whose, bar.begins, bar.share) for bar in bars] == [
        ("launcher", 0.0, 0.05), ("launcher", 0.05, 0.15), ("rank 0", 0.2, 0.2), ("rank 0", 0.4, 0.4),
        ("rank 0", 0.8, 0.0), ("rank 0", 0.8, 0.2),
    ]  # fmt: skip
    assert [bar.text for bar in bars] == ["1.0 s", "3.0 s", "4.0 s", "8.0 s", "0.0 s", "4.0 s"]
    assert bars[3].name == "model built, random weights drawn"
    assert bars[4].name == "a later phase"
    assert start_bars({"start_up": START_UP, "model": {"weights": "pretrained"}})[0][3].name == "model built"
    assert start_bars({"start_up": START_UP})[0][3].name == "model built"
    assert note == "20 s from the command to the end of the first optimizer step."


@pytest.mark.parametrize(
    "manifest", [None, {}, {"start_up": None}, {"start_up": START_UP | {"rank": {}, "first_step_s": None}}]
)
def test_nothing_is_drawn_before_the_first_step(manifest) -> None:
    assert start_bars(manifest) == ([], "")


def test_the_page_has_them(make_run, tmp_path: Path) -> None:
    folder = make_run()
    file = folder / "manifest.json"
    write_report([folder], tmp_path / "before.html")
    assert "The start" not in (tmp_path / "before.html").read_text()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"start_up": START_UP}))
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "The start" in page
    assert 'x="40.00%" width="40.00%"' in page
    assert "20 s from the command" in page
