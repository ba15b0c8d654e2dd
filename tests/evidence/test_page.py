"""The page of a verification, with and without something to draw."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.evidence.gather import read_finished
from tunebook.evidence.page import write_page

from .conftest import MakeRun, curve


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])


def page_of(run: Path) -> str:
    file = write_page(verify(read_finished(run), []), Console())
    assert file == run / "verify.html"
    return file.read_text()


def test_page_without_differences_has_a_sentence_instead_of_a_chart(evidence: Path, make_run: MakeRun) -> None:
    page = page_of(make_run())
    assert "the means of all 20 windows of steps are bitwise equal" in page
    assert "Difference of the loss" not in page
    page = page_of(make_run(losses=curve(1.000001)))
    assert "bitwise equal.</p>" not in page
    assert "A window may differ by 1e-05, 0.001 %: -5.0 on this axis. 16 of 20 windows are bitwise equal" in page
