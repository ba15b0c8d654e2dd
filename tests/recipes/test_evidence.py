"""What is recorded in the book still means what it did: it composes to the same, and its card shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.config.book import book_root
from tunebook.config.compose import compose
from tunebook.config.identity import comparable_config
from tunebook.evidence.card import cells, draw, plot_file, row_start, section
from tunebook.evidence.compare import config_differences
from tunebook.evidence.schema import read_evidence
from tunebook.plan.auto.resolve import resolve_auto

from ..evidence.conftest import machine_of

RECIPES = book_root() / "recipes"
FILES = sorted(RECIPES.glob("*/evidence/*.json"))
FOLDERS = sorted({file.parent for file in FILES})
# Resolving takes seconds.
EVERY_TIME = [min(RECIPES.glob(f"{name}/evidence/*.json")) for name in ("quickstart", "zero3_lora")]


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[] if file in EVERY_TIME else [pytest.mark.nightly]) for file in FILES],
    ids=lambda file: f"{file.parent.parent.name}-{file.stem}",
)
def test_its_words_still_compose_to_what_was_run(file: Path) -> None:
    evidence = read_evidence(file)
    assert evidence.ran.recipe == file.parent.parent.name
    assert file.stem == f"{evidence.hardware.generation}-{evidence.hardware.gpus}-{evidence.label}"
    composition = compose(evidence.ran.recipe, evidence.ran.overrides)
    config = resolve_auto(composition.config, machine_of(evidence.hardware)).config
    changed = config_differences(evidence.inputs.config, comparable_config(config))
    assert changed == [], "the recipe means something else now: record its evidence again"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_its_card_shows_what_the_files_say(folder: Path) -> None:
    files = sorted(folder.glob("*.json"))
    recorded = [(file, read_evidence(file)) for file in files]
    card = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert section(recorded) in card, "write the card again: tunebook verify RUN RUN --record"
    for file, found in recorded:
        assert plot_file(file).read_text(encoding="utf-8") == draw(found)
    assert {file.name for file in folder.iterdir()} == {
        name for file in files for name in (file.name, plot_file(file).name)
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_the_books_table_of_recipes_names_it(folder: Path) -> None:
    files, recipe = sorted(folder.glob("*.json")), folder.parent.name
    link = f"{recipe}/README.md"
    (row,) = [line for line in (RECIPES / "README.md").read_text().splitlines() if line.startswith(row_start(link))]
    assert row.endswith(f"| {cells(link, [read_evidence(file) for file in files])} |")


def test_the_table_names_every_recipe_and_the_readme_shows_some_of_its_rows() -> None:
    rows = [line for line in (RECIPES / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert sorted(row.partition("](")[0].removeprefix("| [") for row in rows) == sorted(
        file.stem for file in RECIPES.glob("*.yaml")
    )
    shown = [line for line in (RECIPES.parent / "README.md").read_text().splitlines() if line.startswith("| [")]
    shown = [line.replace("](recipes/", "](") for line in shown if "](recipes/" in line]
    assert len(shown) == 6 and set(shown) <= set(rows)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.parent.name}/{file.stem}")
def test_a_lock_is_claimed_only_where_every_package_was_the_locks(file: Path) -> None:
    software = read_evidence(file).software
    assert software.lock is not None
    assert (software.lock_sha256 is None) == (software.deviation() is not None)


def test_the_evidence_of_gpus_says_which_torch_it_was_recorded_with() -> None:
    on_gpus = [found for found in map(read_evidence, FILES) if found.hardware.gpu is not None]
    assert len(on_gpus) >= 18
    for found in on_gpus:
        if found.software.packages["torch"] == "2.11.0":
            assert (found.software.deviation() or "").startswith("torch 2.11.0 where the lock has 2.13.0, ")
