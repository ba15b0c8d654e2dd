"""Files that are JSON and no record: named, with what is wrong, wherever a run is drawn or compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.verify import diff_command
from tunebook.errors import DataError, RequestError
from tunebook.record.intact import is_number, naming
from tunebook.record.report import write_report

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
        ("plan.json", "batch", "x", r"plan\.json: batch is 'x' and no section"),
        ("plan.json", "batch.world_size", "x", r"plan\.json: batch\.world_size is 'x' and no number"),
        ("plan.json", "choices", [1], r"plan\.json: choices is no list of sections"),
        ("manifest.json", "status.started", "x", r"manifest\.json.*Invalid isoformat string: 'x'"),
        ("manifest.json", "status.seconds", "x", r"manifest\.json is no whole manifest: status\.seconds: "),
        ("manifest.json", "hardware.cpus", -1, r"manifest\.json is no whole manifest: hardware\.cpus: "),
        ("evaluation/after.json", "tasks", [], r"after\.json: tasks is \[\] and no section"),
        ("evaluation/before.json", "tasks.example", "x", r"before\.json: tasks\.example is 'x' and no section"),
        ("evaluation/after.json", "tasks.example.value", "x", r"tasks\.example\.value is 'x' and no number"),
        ("evaluation/after.json", "samples", "x", r"after\.json: samples is no list of sections"),
        ("evaluation/after.json", "tasks.example.metric", None, r"or evaluation/ holds what Tunebook does not write"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_named_by_the_report(
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
def test_what_is_no_object_is_no_record(make_run: MakeRun, tmp_path: Path, name: str, content: str) -> None:
    run = make_run()
    (run / name).write_text(content)
    with pytest.raises(DataError, match=rf"{Path(name).name}: it is no object"):
        write_report([run], tmp_path / "page.html")


def test_two_runs_of_which_one_is_broken_are_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    whole, broken = make_run(), make_run("2026-11-21T07-18-06Z")
    edit(broken / "manifest.json", "earlier_attempts", 3)
    with pytest.raises(DataError, match=r"06Z/manifest\.json is no whole manifest: earlier_attempts"):
        diff_command((str(whole), str(broken)), tmp_path, Console(file=StringIO()))


def test_of_several_runs_all_are_named_since_it_may_be_either(tmp_path: Path) -> None:
    said = r"/one or /two: its run\.yaml, .*or evaluation/ holds .*\(KeyError: 'location'\)"
    with pytest.raises(DataError, match=said), naming(Path("/one"), Path("/two")):
        raise KeyError("location")


def test_a_configuration_without_a_section_is_drawn_without_it(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (run / "run.yaml").write_text("recipe: example\nparallelism:\n  strategy: ddp\n")
    write_report([run], tmp_path / "page.html")
    assert "ddp" in (tmp_path / "page.html").read_text()
    (run / "run.yaml").write_text("recipe: example\npeft: full\n")
    with pytest.raises(DataError, match=r"run\.yaml cannot be read .*: peft is 'full' and no section"):
        write_report([run], tmp_path / "page.html")


def test_what_is_refused_on_purpose_stays_as_it_is() -> None:
    with pytest.raises(RequestError, match="asked for something else"), naming(Path("run")):
        raise RequestError("asked for something else")


def test_a_whole_number_beyond_every_float_is_no_number_that_is_worked_with():
    assert not is_number(10**400)
    assert is_number(10**300) and is_number(None) and not is_number(float("inf"))
