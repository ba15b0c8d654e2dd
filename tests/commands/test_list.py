"""`tunebook list`: names that can be typed, and titles as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.list import recipes_table
from tunebook.config.book import find_recipes


def printed(width: int, *folders: Path) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(recipes_table([*folders]))
    return capture.get()


def test_titles_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebook.config.book.recipe_folders", lambda named: named)
    title = "LoRA [r=8] of data[/x] :smile:"
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /dataset: synthetic\n  - override /parallelism: ddp\n"
        f"  - _self_\ntitle: '{title}'\nmodel:\n  name: a/b\n"
    )
    row = printed(240, tmp_path).splitlines()[1]
    assert row.split()[0] == "mine" and title in row


def test_a_narrow_terminal_cuts_no_name() -> None:
    shown = printed(80)
    names = [line.split()[0] for line in shown.splitlines()[1:] if not line.startswith(" ")]
    assert [name for name in names if name != "recipe"] == list(find_recipes([]))  # its heading may take two lines
    assert "…" not in shown
