"""Arguments and options that several commands share, and the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tunebook.config.book import find_recipes
from tunebook.errors import TunebookError


def complete_recipe(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes that a shell completes a word to: none after the first word, and none where they cannot be read.

    It runs at every press of the key, so it reads names of files only: no YAML, no Hydra.
    """
    if ctx.params.get("words"):  # what follows the recipe is KEY=VALUE
        return []
    try:
        return [name for name in find_recipes(ctx.params.get("recipes_dir") or []) if name.startswith(incomplete)]
    except TunebookError:  # a shell has no place for a message; the command itself prints it
        return []


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, then Hydra overrides.", autocompletion=complete_recipe
    ),
]
RecipesDir = Annotated[
    list[Path] | None,
    typer.Option("--recipes-dir", help="A folder with recipes of your own; may be given again. Also TUNEBOOK_RECIPES."),
]
RunFolder = Annotated[
    Path | None, typer.Option("--run-folder", help="Make the run here instead of in outputs/<recipe>/<time>.")
]
Outputs = Annotated[Path, typer.Option("--outputs", help="The folder that holds the run folders.")]


def make_console() -> Console:
    """Without a terminal rich assumes 80 columns, which breaks paths and commands that people copy."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
