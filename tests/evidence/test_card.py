"""The card's section and picture, and the row of the book's table, made from evidence files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tunebook.evidence.card import BEGIN, END, cells, plot_file, section, update_card, update_overview
from tunebook.evidence.schema import read_evidence

from .conftest import MakeRun, Record, curve

TABLE = """| recipe | what | evidence | best score |
|---|---|---|---|
| [quickstart](recipes/quickstart/README.md) | word tasks | on its card | - |
| [other](recipes/other/README.md) | the same | none yet | - |
"""


@pytest.fixture
def evidence(make_run: MakeRun, record: Record) -> Path:
    return record(make_run(), make_run(), label="one")


def test_recording_updates_only_the_evidence_section(card: Path, evidence: Path) -> None:
    text = card.read_text()
    assert text.startswith("# quickstart\n\n## Claim\n\nIt learns.\n\n## Evidence\n\n" + BEGIN)
    assert text.endswith(END + "\n\n### Measured\n\nBy hand.\n")
    assert "None recorded yet" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| [cpu-1-one]")]
    assert row.endswith(f"| {curve()[-1]:.4f} | 1,000 | 2.00 | words 0.900 | 1e-05 |")
    assert "random weights, real data, layers: all 2, 60 steps; 1 x CPU, 2 runs" in row


def test_speeds_that_are_not_judged_are_shown_as_a_range(card: Path, make_run: MakeRun, record: Record) -> None:
    record(make_run(speed=11_933.0), make_run(speed=5_486.0))
    assert "| 5,486 to 11,933, not judged |" in card.read_text()


def test_the_best_validation_loss_stands_beside_the_final_loss(card: Path, make_run: MakeRun, record: Record) -> None:
    record(*(make_run(validation={30: 2.25, 60: 2.5}) for _ in range(2)))
    assert "| final loss (best validation) |" in card.read_text()
    assert f"| {curve()[-1]:.4f} (2.2500) |" in card.read_text()


def test_each_file_is_one_line_and_updating_is_idempotent(
    card: Path, evidence: Path, make_run: MakeRun, record: Record
) -> None:
    record(make_run("training.seed=1"), make_run("training.seed=1"), label="two")
    text = card.read_text()
    table, folded = text.split("<details>")
    assert table.count("![loss of ") == 1, "one picture; the table links the others"
    assert table.count(" ([loss](evidence/cpu-1-") == 2
    assert "```bash\ntunebook train quickstart training.seed=1\n```" in folded
    update_card(card, sorted(evidence.parent.glob("*.json")))
    assert card.read_text() == text


def test_the_picture_stands_alone_and_holds_the_curve(evidence: Path) -> None:
    root = ElementTree.fromstring(plot_file(evidence).read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    paths = [path.get("d", "") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert len(paths) == 2  # each step, and their mean
    assert paths[0].count("L") == len(curve()) - 1


def test_the_picture_says_what_the_loss_is_of(make_run: MakeRun, record: Record) -> None:
    assert ">loss per pair<" in plot_file(record(make_run("method=dpo"), make_run("method=dpo"))).read_text()


@pytest.mark.parametrize("text", [None, "# mine\n\nWhat it is.\n"])
def test_a_card_without_the_heading_gets_it(card: Path, make_run: MakeRun, record: Record, text: str | None) -> None:
    card.unlink()
    if text is not None:
        card.write_text(text)
    record(make_run(), make_run())
    written = card.read_text()
    assert written.startswith(text or f"# {card.parent.name}\n")
    assert written.count("## Evidence\n") == 1 and "(evidence/cpu-1-try.svg)" in written


def test_the_row_counts_the_files_and_the_others_stay(tmp_path: Path, evidence: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TABLE)
    update_overview(readme, tmp_path / "recipes" / "unlisted" / "README.md", [evidence])
    assert readme.read_text() == TABLE
    update_overview(readme, tmp_path / "recipes" / "quickstart" / "README.md", [evidence])
    row = "| [1 from-scratch](recipes/quickstart/README.md#evidence) | words 0.900 |"
    assert readme.read_text() == TABLE.replace("| on its card | - |", row)


def test_real_evidence_comes_first_in_a_card_and_its_score_counts(evidence: Path) -> None:
    found = read_evidence(evidence)
    generated = found.model_copy(update={"ran": found.ran.model_copy(update={"data": "generated"})})
    lower = found.results.scores["words"].model_copy(update={"value": 0.125})
    pretrained = found.model_copy(
        update={
            "ran": found.ran.model_copy(update={"weights": "pretrained"}),
            "results": found.results.model_copy(update={"scores": {"words": lower}}),
        }
    )
    recorded = [generated, found, pretrained]
    rows = [line for line in section([(evidence, one) for one in recorded]).splitlines() if line.startswith("| [")]
    kinds = ["real evidence", "from-scratch evidence", "machinery evidence"]
    assert [row.split(" | ")[1].partition(":")[0] for row in rows] == kinds
    assert cells("recipes/quickstart/README.md", recorded) == (
        "[1 real, 1 from-scratch, 1 machinery](recipes/quickstart/README.md#evidence) | words 0.125"
    )
