"""The page of all evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.commands.record_evidence import record_evidence
from tunebook.errors import DataError, RequestError
from tunebook.evidence.files import read_evidence
from tunebook.evidence.gallery import facts, write_gallery
from tunebook.evidence.gather import read_finished

from .conftest import MakeRun


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    runs = [read_finished(make_run("training.seed=1")) for _ in range(2)]
    return record_evidence(runs, "try", [])


def test_the_page_shows_every_file_with_its_numbers_and_command(evidence: Path, tmp_path: Path) -> None:
    file = write_gallery({"other": [], "quickstart": [evidence]}, tmp_path / "new" / "folder")
    page = file.read_text()
    assert "Evidence of 1 recipe<" in page
    for text in ("From-scratch evidence", "quickstart: try", "2.00 GiB", "1,000"):
        assert text in page
    assert all(f"</svg>{name}</li>" in page for name in ("each step", "mean"))
    assert "tunebook train quickstart training.seed=1" in page
    assert "Real evidence" not in page, "a kind that nothing is of"


def test_an_exhibit_begins_with_its_scores(evidence: Path) -> None:
    shown = facts(read_evidence(evidence))
    score = read_evidence(evidence).results.scores["words"]
    assert shown[0] == ("words", f"{score.metric} 0.900 ± {score.stderr:.3f}")
    assert dict(shown)["layers"] == "all 2"


def test_without_evidence_or_with_a_damaged_file_nothing_is_written(evidence: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no recipe here has evidence"):
        write_gallery({"quickstart": []}, tmp_path / "gallery")
    evidence.write_text("{}")
    with pytest.raises(DataError, match="it has no format"):
        write_gallery({"quickstart": [evidence]}, tmp_path / "gallery")
    assert not (tmp_path / "gallery").exists()


def test_a_folder_that_cannot_be_made_is_refused(evidence: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="the gallery cannot be written"):
        write_gallery({"quickstart": [evidence]}, tmp_path / "file" / "gallery")
