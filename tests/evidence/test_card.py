"""The card's section and picture, made from evidence files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.verify import verify_command
from tunebook.errors import DataError, RequestError
from tunebook.evidence.card import (
    BEGIN,
    END,
    cells,
    listed,
    plot_file,
    section,
    update_card,
    update_overview,
    with_section,
)
from tunebook.evidence.files import read_evidence
from tunebook.evidence.gather import read_finished
from tunebook.evidence.target import parse_target

from .conftest import MakeRun, curve

CARD = "# quickstart\n\n## Claim\n\nIt learns.\n\n## Evidence\n\nNone recorded yet.\n\n### Measured\n\nBy hand.\n"
TABLE = """| recipe | what | evidence | best score |
|---|---|---|---|
| [quickstart](recipes/quickstart/README.md) | word tasks | on its card | - |
| [other](recipes/other/README.md) | the same | none yet | - |
"""


@pytest.fixture
def card(recipes_dir: Path) -> Path:
    file = recipes_dir / "quickstart" / "README.md"
    file.parent.mkdir(parents=True)
    file.write_text(CARD)
    return file


def record(*runs: Path, label: str) -> None:
    code = verify_command([str(run) for run in runs], Path(), [], Console(file=StringIO()), record=True, label=label)
    assert code == 0


def test_recording_updates_only_the_evidence_section(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    text = card.read_text()
    assert text.startswith("# quickstart\n\n## Claim\n\nIt learns.\n\n## Evidence\n\n" + BEGIN)
    assert text.endswith(END + "\n\n### Measured\n\nBy hand.\n")
    assert "None recorded yet" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| [cpu-1-one]")]
    assert row.endswith(f"| {curve()[-1]:.4f} | 1,000 | 2.00 | words 0.900 | 1e-05 |")
    assert "random weights, real data, layers: all 2, 60 steps; 1 x CPU, 2 runs" in row


def test_scattered_speeds_are_shown_as_a_range(card: Path, make_run: MakeRun) -> None:
    record(make_run(speed=11_933.0), make_run(speed=5_486.0), label="one")
    record(make_run("training.seed=1", speed=1_000.0), make_run("training.seed=1", speed=1_090.0), label="two")
    rows = [line for line in card.read_text().splitlines() if line.startswith("| [")]
    assert ["| 5,486 to 11,933, not judged |" in row for row in rows] == [True, False]
    assert "| 1,000 |" in rows[1]


def test_each_file_is_one_line_and_updating_is_idempotent(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    record(make_run("training.seed=1"), make_run("training.seed=1"), label="two")
    text = card.read_text()
    assert [line.split("]")[0] for line in text.splitlines() if line.startswith("| [")] == [
        "| [cpu-1-one", "| [cpu-1-two",
    ]  # fmt: skip
    update_card(card, sorted((card.parent / "evidence").glob("*.json")))
    assert card.read_text() == text


def test_the_table_is_short_and_the_commands_are_folded(card: Path, make_run: MakeRun) -> None:
    record(make_run("training.seed=1"), make_run("training.seed=1"), label="one")
    record(make_run(), make_run(), label="two")
    table, folded = card.read_text().split("<details>")
    assert table.count("![loss of ") == 1, "one picture; the table links the others"
    assert table.count(" ([loss](evidence/cpu-1-") == 2
    assert "training.seed=1" not in table
    assert "```bash\ntunebook train quickstart training.seed=1\n```" in folded


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


def test_nothing_is_written_if_another_file_is_damaged(card: Path, make_run: MakeRun) -> None:
    record(make_run(), make_run(), label="one")
    damaged = card.parent / "evidence" / "cpu-1-one.json"
    damaged.write_text("{}")
    before = card.read_text()
    with pytest.raises(DataError, match=r"cpu-1-one\.json: it has no format.*--record --label NAME"):
        record(make_run(), make_run(), label="two")
    assert sorted(file.name for file in damaged.parent.iterdir()) == ["cpu-1-one.json", "cpu-1-one.svg"]
    assert card.read_text() == before


def test_text_outside_the_marks_is_kept() -> None:
    before = f"a\n{BEGIN}\nold\n{END}\nz\n"
    assert with_section(before, f"{BEGIN}\nnew\n{END}", Path("card")) == f"a\n{BEGIN}\nnew\n{END}\nz\n"


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])


def test_the_row_counts_the_files_and_the_others_stay(tmp_path: Path, evidence: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TABLE)
    assert update_overview(readme, "quickstart", [evidence])
    lines = readme.read_text().splitlines()
    score = read_evidence(evidence).results.scores["words"].value
    assert lines[2] == (
        "| [quickstart](recipes/quickstart/README.md) | word tasks | "
        f"[1 from-scratch](recipes/quickstart/README.md#evidence) | words {score:.3f} |"
    )
    assert [lines[number] for number in (0, 1, 3)] == [TABLE.splitlines()[number] for number in (0, 1, 3)]
    again = readme.read_text()
    assert update_overview(readme, "quickstart", [evidence])
    assert readme.read_text() == again


def test_a_book_without_the_row_is_left_alone(tmp_path: Path, evidence: Path) -> None:
    readme = tmp_path / "README.md"
    assert not update_overview(readme, "quickstart", [evidence])
    readme.write_text(TABLE)
    assert not update_overview(readme, "unlisted", [evidence])
    assert not update_overview(readme, "quickstart", [])
    assert readme.read_text() == TABLE


def test_machinery_evidence_has_no_score(project_root: Path) -> None:
    files = sorted((project_root / "recipes/qwen3b_zero2/evidence").glob("*.json"))
    made = cells("qwen3b_zero2", [read_evidence(file) for file in files])
    assert made == f"[{len(files)} machinery](recipes/qwen3b_zero2/README.md#evidence) | -"


def test_real_evidence_comes_first_in_a_card_and_its_score_counts(make_run: MakeRun, recipes_dir: Path) -> None:
    files = [record_evidence([read_finished(make_run()) for _ in range(2)], label, []) for label in ("a", "b", "c")]
    found = [read_evidence(file) for file in files]
    generated = found[0].ran.model_copy(update={"data": "generated"})
    pretrained = found[2].ran.model_copy(update={"weights": "pretrained"})
    found = [
        found[0].model_copy(update={"ran": generated}), found[1], found[2].model_copy(update={"ran": pretrained})
    ]  # fmt: skip
    lower = found[2].results.scores["words"].model_copy(update={"value": 0.125})
    found[2] = found[2].model_copy(update={"results": found[2].results.model_copy(update={"scores": {"words": lower}})})
    kinds = ["real evidence", "from-scratch evidence", "machinery evidence"]
    rows = [line for line in section(list(zip(files, found, strict=True))).splitlines() if line.startswith("| [")]
    assert [row.split(" | ")[1].partition(":")[0] for row in rows] == kinds
    assert cells("quickstart", found) == (
        "[1 real, 1 from-scratch, 1 machinery](recipes/quickstart/README.md#evidence) | words 0.125"
    )


def test_recipes_with_real_evidence_come_first_in_the_table(tmp_path: Path, evidence: Path) -> None:
    def row(recipe: str, what: str) -> str:
        return f"| [{recipe}](recipes/{recipe}/README.md) | x | {what} | - |"

    others = [row("a", "none yet"), row("b", "[2 machinery](b)"), row("c", "[1 real, 12 machinery](c)")]
    readme = tmp_path / "README.md"
    readme.write_text("\n".join([*TABLE.splitlines()[:2], *others, TABLE.splitlines()[2], "", "z"]))
    assert update_overview(readme, "quickstart", [evidence])
    lines = readme.read_text().splitlines()
    assert [line[3] for line in lines[2:6]] == ["c", "q", "a", "b"]
    assert lines[:2] + lines[6:] == [*TABLE.splitlines()[:2], "", "z"]


def test_a_card_shows_a_target_and_when_it_was_reached(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [read_finished(make_run()) for _ in range(2)]
    file = record_evidence(runs, "try", [], parse_target("words:exact_match>=0.9"))
    header, _, row = section([(file, read_evidence(file))]).splitlines()[2:5]
    assert header.endswith("| loss may differ by | target |")
    assert row.endswith("| words:exact_match >= 0.9: reached at step 60, after 6 to 6.1 s of training |")


def test_a_list_names_the_kind_once(evidence: Path) -> None:
    assert listed([]) == "none yet"
    damaged = evidence.with_name("damaged.json")
    damaged.write_text("{}")
    assert listed([damaged, evidence, evidence]) == "from-scratch evidence: cpu-1-try, cpu-1-try; damaged: damaged"
