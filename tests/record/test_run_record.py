"""A damaged record: the error names the file and the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import DataError
from tunebook.record.report import write_report

MakeRun = Callable[..., Path]


def edit(file: Path, key: str, value: Any) -> None:
    """Set one dotted key of a JSON file, or all of it."""
    content = json.loads(file.read_text())
    *sections, name = key.split(".")
    reduce(lambda node, section: node[section], sections, content)[name] = value
    file.write_text(json.dumps(content))


def test_damaged_run_is_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    whole, broken = make_run(), make_run("2026-11-21T07-18-06Z")
    edit(broken / "manifest.json", "earlier_attempts", 3)
    with pytest.raises(DataError, match=r"06Z/manifest\.json is no whole manifest: earlier_attempts"):
        write_report([whole, broken], tmp_path / "page.html")


def test_a_configuration_without_a_section_is_drawn_without_it(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (run / "run.yaml").write_text("recipe: example\nparallelism:\n  strategy: ddp\n")
    write_report([run], tmp_path / "page.html")
    assert "ddp" in (tmp_path / "page.html").read_text()
    (run / "run.yaml").write_text("[1")
    with pytest.raises(DataError, match=r"run\.yaml"):
        write_report([run], tmp_path / "page.html")
