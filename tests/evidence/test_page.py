"""The page of a verification, with and without something to draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.evidence.gather import read_finished
from tunebook.evidence.page import write_page

from .conftest import MakeRun, curve


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])


def test_page_without_differences_has_a_sentence_instead_of_a_chart(
    evidence: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    perfect, file = make_run(), tmp_path / "verify.html"
    write_page(verify(read_finished(perfect), []), perfect.name, file)
    page = file.read_text()
    assert "the means of all 20 windows of steps are bitwise equal" in page
    assert "Difference of the loss" not in page
    nearly = make_run(losses=curve(1.000001))
    write_page(verify(read_finished(nearly), []), nearly.name, file)
    page = file.read_text()
    assert "bitwise equal.</p>" not in page
    assert "A window may differ by 1e-05, 0.001 %: -5.0 on this axis. 16 of 20 windows are bitwise equal" in page
