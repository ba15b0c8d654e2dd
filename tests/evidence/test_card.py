"""The card's section and picture, made from evidence files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.verify import verify_command
from tunebook.errors import DataError, RequestError
from tunebook.evidence.card import BEGIN, END, plot_file, update_card, with_section

from .conftest import MakeRun, curve

CARD = "# quickstart\n\n## Claim\n\nIt learns.\n\n## Evidence\n\nNone recorded yet.\n\n### Measured\n\nBy hand.\n"


@pytest.fixture
def card(recipes_dir: Path) -> Path:
    file = recipes_dir / "quickstart" / "README.md"
    file.parent.mkdir(parents=True)
    file.write_text(CARD)
    return file


def record(*runs: Path, label: str) -> None:
    code = verify_command([str(run) for run in runs], Path(), [], Console(file=StringIO()), record=True, label=label)
    assert code == 0


def test_recording_shows_the_evidence_under_its_heading_and_leaves_the_rest(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    text = card.read_text()
    assert text.startswith("# quickstart\n\n## Claim\n\nIt learns.\n\n## Evidence\n\n" + BEGIN)
    assert text.endswith(END + "\n\n### Measured\n\nBy hand.\n")
    assert "None recorded yet" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| [cpu-1-one]")]
    assert row.endswith(f"| {curve()[-1]:.4f} | 1,000 | 2.00 | words 0.900 | 1e-05 |")
    assert "random weights, real data, layers: all 2, 60 steps; 1 x CPU, 2 runs" in row


def test_where_repetitions_are_far_apart_all_that_lies_between_them_is_the_speed(card: Path, make_run: MakeRun) -> None:
    record(make_run(speed=11_933.0), make_run(speed=5_486.0), label="one")
    record(make_run("training.seed=1", speed=1_000.0), make_run("training.seed=1", speed=1_090.0), label="two")
    rows = [line for line in card.read_text().splitlines() if line.startswith("| [")]
    assert ["| 5,486 to 11,933, not judged |" in row for row in rows] == [True, False]
    assert "| 1,000 |" in rows[1]


def test_more_evidence_is_another_line_and_making_it_again_changes_nothing(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    record(make_run("training.seed=1"), make_run("training.seed=1"), label="two")
    text = card.read_text()
    assert [line.split("]")[0] for line in text.splitlines() if line.startswith("| [")] == [
        "| [cpu-1-one", "| [cpu-1-two",
    ]  # fmt: skip
    update_card(card, sorted((card.parent / "evidence").glob("*.json")))
    assert card.read_text() == text


def test_the_picture_stands_alone_and_holds_the_curve(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    picture = plot_file(card.parent / "evidence" / "cpu-1-one.json")
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    paths = [path.get("d", "") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert len(paths) == 2  # each step, and their mean
    assert paths[0].count("L") == len(curve()) - 1
    assert f"evidence/{picture.name}" in card.read_text()


def test_a_card_without_the_heading_is_refused_before_anything_is_written(card: Path, make_run: MakeRun) -> None:
    card.write_text("# quickstart\n")
    with pytest.raises(RequestError, match="has no heading '## Evidence'"):
        record(make_run(), make_run(), label="one")
    card.unlink()
    with pytest.raises(RequestError, match=r"README\.md cannot be read"):
        record(make_run(), make_run(), label="one")
    assert not (card.parent / "evidence").exists()


def test_beside_a_damaged_file_nothing_is_written(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    damaged = card.parent / "evidence" / "cpu-1-one.json"
    damaged.write_text("{}")
    before = card.read_text()
    with pytest.raises(DataError, match=r"cpu-1-one\.json: it has no format.*--record --label NAME"):
        record(make_run(), make_run(), label="two")
    assert sorted(file.name for file in damaged.parent.iterdir()) == ["cpu-1-one.json", "cpu-1-one.svg"]
    assert card.read_text() == before


def test_what_stands_outside_the_marks_is_never_touched() -> None:
    before = f"a\n{BEGIN}\nold\n{END}\nz\n"
    assert with_section(before, f"{BEGIN}\nnew\n{END}", Path("card")) == f"a\n{BEGIN}\nnew\n{END}\nz\n"
