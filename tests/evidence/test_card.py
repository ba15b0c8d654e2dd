"""The card's section and picture, made from evidence files."""

from __future__ import annotations

import re
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
    cell,
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
TABLE = """| recipe | what | evidence |
|---|---|---|
| [quickstart](recipes/quickstart/README.md) | word tasks | on its card |
| [other](recipes/other/README.md) | the same | none yet |
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


def test_the_row_links_every_file_and_the_others_stay(tmp_path: Path, evidence: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TABLE)
    assert update_overview(readme, "quickstart", [evidence])
    lines = readme.read_text().splitlines()
    assert lines[2] == (
        f"| [quickstart](recipes/quickstart/README.md) | word tasks | "
        f"[1 x CPU](recipes/quickstart/evidence/{evidence.name}) (from-scratch evidence) |"
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


def test_two_claims_on_the_same_gpus_are_told_apart(project_root: Path) -> None:
    files = sorted((project_root / "recipes/qwen3b_zero2/evidence").glob("*.json"))
    links = cell("qwen3b_zero2", files, [read_evidence(file) for file in files]).split("), [")
    names = [link.partition("]")[0].removeprefix("[") for link in links]
    assert names == ["1 x H200, bf16", "2 x H200, bf16", "4 x H200, bf16", "4 x H200, fp32"]


def test_claims_in_one_number_format_are_told_apart_by_what_else_they_ran_with(project_root: Path) -> None:
    files = sorted((project_root / "recipes/qwen05b_single/evidence").glob("*.json"))
    links = cell("qwen05b_single", files, [read_evidence(file) for file in files]).split("), [")
    names = [link.partition("]")[0].removeprefix("[") for link in links]
    assert names == ["1 x H200, bf16, varlen_attention", "1 x H200, bf16, deterministic", "1 x H200, bf16, sdpa"]


def test_claims_that_differ_in_nothing_else_are_told_apart_by_their_labels_or_steps(
    make_run: MakeRun, recipes_dir: Path
) -> None:
    def names(*words: str, label: str) -> list[str]:
        record_evidence([read_finished(make_run(*words)), read_finished(make_run(*words))], label, [])
        files = sorted((recipes_dir / "quickstart" / "evidence").glob("*.json"))
        found = [read_evidence(file) for file in files]
        if label == "shorter":  # which the made-up runs of one length are not
            found[1] = found[1].model_copy(update={"ran": found[1].ran.model_copy(update={"steps": 6})})
        links = cell("quickstart", files, found).split("), [")
        return [link.partition("]")[0].removeprefix("[") for link in links]

    assert names(label="any") == ["1 x CPU"]
    assert names(label="shorter") == ["1 x CPU, 60 steps", "1 x CPU, 6 steps"]
    assert names("training.seed=1", label="t1") == ["1 x CPU, any", "1 x CPU, shorter", "1 x CPU, t1"]


def test_real_evidence_comes_first_in_a_cell_and_in_a_card(make_run: MakeRun, recipes_dir: Path) -> None:
    files = [record_evidence([read_finished(make_run()) for _ in range(2)], label, []) for label in ("a", "b", "c")]
    found = [read_evidence(file) for file in files]
    generated = found[0].ran.model_copy(update={"data": "generated"})
    pretrained = found[2].ran.model_copy(update={"weights": "pretrained"})
    found = [
        found[0].model_copy(update={"ran": generated}), found[1], found[2].model_copy(update={"ran": pretrained})
    ]  # fmt: skip
    links = cell("quickstart", files, found)
    kinds = ["real evidence", "from-scratch evidence", "machinery evidence"]
    assert re.findall(r"evidence/cpu-1-(.)\.json\) \(([^)]*)\)", links) == list(zip("cba", kinds, strict=True))
    rows = [line for line in section(files, found).splitlines() if line.startswith("| [")]
    assert [row.split(" | ")[1].partition(":")[0] for row in rows] == kinds


def test_recipes_with_real_evidence_come_first_in_the_table(tmp_path: Path, evidence: Path) -> None:
    def row(recipe: str, what: str) -> str:
        return f"| [{recipe}](recipes/{recipe}/README.md) | x | {what} |"

    others = [row("a", "none yet"), row("b", "[1](c) (machinery evidence)"), row("c", "[1](c) (real evidence)")]
    readme = tmp_path / "README.md"
    readme.write_text(
        "\n".join(["| recipe | what | evidence |", "|---|---|---|", *others, TABLE.splitlines()[2], "", "z"])
    )
    assert update_overview(readme, "quickstart", [evidence])
    lines = readme.read_text().splitlines()
    assert [line[3] for line in lines[2:6]] == ["c", "q", "a", "b"]
    assert lines[:2] + lines[6:] == ["| recipe | what | evidence |", "|---|---|---|", "", "z"]


def test_a_card_shows_a_target_and_when_it_was_reached(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [read_finished(make_run()) for _ in range(2)]
    file = record_evidence(runs, "try", [], parse_target("words:exact_match>=0.9"))
    header, _, row = section([file], [read_evidence(file)]).splitlines()[2:5]
    assert header.endswith("| loss may differ by | target |")
    assert row.endswith("| words:exact_match >= 0.9: reached at step 60, after 6 to 6.1 s of training |")


def test_a_list_names_the_kind_once(evidence: Path) -> None:
    assert listed([]) == "none yet"
    damaged = evidence.with_name("damaged.json")
    damaged.write_text("{}")
    assert listed([damaged, evidence, evidence]) == "from-scratch evidence: cpu-1-try, cpu-1-try; damaged: damaged"
