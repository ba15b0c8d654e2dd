"""Valid JSON that is not a valid record: the error names the file and the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.record.metrics import is_number
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
    ("name", "key", "value", "said"),
    [
        ("plan.json", "batch", "x", r"plan\.json: batch is 'x', not a section"),
        ("plan.json", "batch.world_size", "x", r"plan\.json: batch\.world_size is 'x', not a number"),
        ("plan.json", "choices", [1], r"plan\.json: choices is not a list of sections"),
        ("manifest.json", "status.started", "x", r"manifest\.json.*Invalid isoformat string: 'x'"),
        ("manifest.json", "status.seconds", "x", r"manifest\.json is no whole manifest: status\.seconds: "),
        ("manifest.json", "hardware.cpus", -1, r"manifest\.json is no whole manifest: hardware\.cpus: "),
        ("evaluation/after.json", "tasks", [], r"after\.json: tasks is \[\], not a section"),
        ("evaluation/before.json", "tasks.example", "x", r"before\.json: tasks\.example is 'x', not a section"),
        ("evaluation/after.json", "tasks.example.value", "x", r"tasks\.example\.value is 'x', not a number"),
        ("evaluation/after.json", "samples", "x", r"after\.json: samples is not a list of sections"),
        ("evaluation/after.json", "tasks.example.metric", None, r"or evaluation/ holds what Tunebook does not write"),
    ],
)  # fmt: skip
def test_report_names_the_damaged_record(
    make_run: MakeRun, tmp_path: Path, name: str, key: str, value: Any, said: str
) -> None:
    run = make_run()
    edit(run / name, key, value)
    with pytest.raises(DataError, match=said) as raised:
        write_report([run], tmp_path / "page.html")
    assert raised.value.problem_id == "broken-record"
    assert str(run) in raised.value.message


@pytest.mark.parametrize("content", ["[]", "3", '"x"'])
@pytest.mark.parametrize("name", ["plan.json", "evaluation/after.json"])
def test_json_without_an_object_is_damaged(make_run: MakeRun, tmp_path: Path, name: str, content: str) -> None:
    run = make_run()
    (run / name).write_text(content)
    with pytest.raises(DataError, match=rf"{Path(name).name}: it is not an object"):
        write_report([run], tmp_path / "page.html")


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
    with pytest.raises(DataError, match=r"run\.yaml: peft is 'full', not a section"):
        write_report([run], tmp_path / "page.html")


def test_deliberate_errors_are_passed_through() -> None:
    with pytest.raises(RequestError, match="asked for something else"), broken_records_named(Path("run")):
        raise RequestError("asked for something else")


def test_integer_beyond_every_float_is_damaged():
    assert not is_number(10**400)
    assert is_number(10**300) and is_number(None) and not is_number(float("inf"))
