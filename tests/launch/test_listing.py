"""`tunebook list`: one recipe, whatever its title and its name, never costs the others."""

from __future__ import annotations

import pytest
from rich.console import Console

from tunebook.config.book import find_recipes
from tunebook.launch.listing import recipes_table


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """`listed("name", "title")`: what is printed of a book with one more recipe."""
    monkeypatch.setattr("tunebook.config.book.recipe_folders", lambda named: named)

    def show(name, title):
        (tmp_path / f"{name}.yaml").write_text(
            "# @package _global_\ndefaults:\n  - override /dataset: synthetic\n  - override /parallelism: ddp\n"
            f"  - _self_\ntitle: '{title}'\nmodel:\n  name: a/b\n"
        )
        console = Console(width=240)
        with console.capture() as capture:
            console.print(recipes_table([tmp_path]))
        return capture.get()

    return show


@pytest.mark.parametrize("title", ["LoRA [r=8] of data[/x] test", "[bold]fat", "ends in \\", ":smile:"])
def test_a_title_is_shown_as_it_is(title, listed):
    assert title in listed("mine", title)


@pytest.mark.parametrize("name", ["größe_1", "a=b", "1"])
def test_a_name_that_cannot_be_trained_says_so_beside_it(name, listed):
    shown = listed(name, "mine")
    assert shown.splitlines()[1].split()[0] == name
    assert f"does not read '{name}' as a name; rename it" in shown


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_cuts_no_name_and_no_label(width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(recipes_table([]))
    shown = capture.get()
    names = [line.split()[0] for line in shown.splitlines()[1:] if not line.startswith(" ")]
    assert [name for name in names if name != "recipe"] == list(find_recipes([]))  # its heading may take two lines
    assert "…" not in shown
