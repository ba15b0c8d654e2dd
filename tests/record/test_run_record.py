"""Valid JSON that is not a valid record: the error names the file and the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.record.report import write_report
from tunebook.record.run_record import broken_records_named

MakeRun = Callable[..., Path]


def edit(file: Path, key: str, value: Any) -> None:
    """Set one dotted key of a JSON file, or all of it."""
    content = json.loads(file.read_text())
    *sections, name = key.split(".")
    reduce(lambda node, section: node[section], sections, content)[name] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "key", "value", "named"),
    [
        ("plan.json", "batch", "x", "plan.json"),
        ("plan.json", "choices", [1], "plan.json"),
        ("manifest.json", "status.started", "x", "manifest.json"),
        ("manifest.json", "status.seconds", "x", "status.seconds"),
        ("manifest.json", "hardware.cpus", -1, "hardware.cpus"),
        ("evaluation/after.json", "tasks", [], "evaluation/"),
        ("evaluation/after.json", "tasks.example.value", "x", "evaluation/"),
        ("evaluation/after.json", "samples", "x", "evaluation/"),
        ("evaluation/after.json", "tasks.example.metric", None, "evaluation/"),
    ],
)
def test_report_refuses_a_damaged_record(
    make_run: MakeRun, tmp_path: Path, name: str, key: str, value: Any, named: str
) -> None:
    run = make_run()
    edit(run / name, key, value)
    with pytest.raises(DataError) as raised:
        write_report([run], tmp_path / "page.html")
    assert raised.value.problem_id == "broken-record"
    assert str(run) in raised.value.message
    assert named in raised.value.message


@pytest.mark.parametrize("name", ["plan.json", "evaluation/after.json", "manifest.json"])
def test_json_without_an_object_is_damaged(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    run = make_run()
    (run / name).write_text("[3]")
    with pytest.raises(DataError) as raised:
        write_report([run], tmp_path / "page.html")
    assert raised.value.problem_id == "broken-record"


def test_damaged_run_is_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    whole, broken = make_run(), make_run("2026-11-21T07-18-06Z")
    edit(broken / "manifest.json", "earlier_attempts", 3)
    with pytest.raises(DataError, match=r"06Z/manifest\.json is no whole manifest: earlier_attempts"):
        write_report([whole, broken], tmp_path / "page.html")


def test_error_names_all_compared_runs(tmp_path: Path) -> None:
    said = r"/one or /two: its run\.yaml, .*or evaluation/ holds .*\(KeyError: 'location'\)"
    with pytest.raises(DataError, match=said), broken_records_named(Path("/one"), Path("/two")):
        raise KeyError("location")


def test_a_configuration_without_a_section_is_drawn_without_it(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (run / "run.yaml").write_text("recipe: example\nparallelism:\n  strategy: ddp\n")
    write_report([run], tmp_path / "page.html")
    assert "ddp" in (tmp_path / "page.html").read_text()
    (run / "run.yaml").write_text("recipe: example\npeft: full\n")
    with pytest.raises(DataError, match=r"run\.yaml"):
        write_report([run], tmp_path / "page.html")


def test_deliberate_errors_are_passed_through() -> None:
    with pytest.raises(RequestError, match="asked for something else"), broken_records_named(Path("run")):
        raise RequestError("asked for something else")
