"""`tunebook list`: names that can be typed, and titles as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.list import recipes_table


@pytest.mark.parametrize("width", [80, 240])
def test_names_are_not_cut_and_titles_are_shown_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("tunebook.config.book.recipe_folders", lambda named: named)
    name, title = "a_recipe_with_a_long_name", "LoRA [r=8] of data[/x] :smile:"
    (tmp_path / f"{name}.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /dataset: synthetic\n  - override /parallelism: ddp\n"
        f"  - _self_\ntitle: '{title}'\nmodel:\n  name: a/b\n"
    )
    console = Console(width=width)
    with console.capture() as capture:
        console.print(recipes_table([tmp_path]))
    shown = capture.get()
    assert shown.count(name) == 1 and "…" not in shown
    assert width == 80 or title in shown
