"""The last column of the table of recipes, on a README of three lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.commands.record_evidence import record_evidence
from tunebook.evidence.card import cell, update_overview
from tunebook.evidence.files import read_evidence
from tunebook.evidence.gather import read_finished

from .conftest import MakeRun

TABLE = """| recipe | what | evidence |
|---|---|---|
| [quickstart](recipes/quickstart/README.md) | word tasks | on its card |
| [other](recipes/other/README.md) | the same | none yet |
"""


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
        f"[1 x CPU](recipes/quickstart/evidence/{evidence.name}) (random weights) |"
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
