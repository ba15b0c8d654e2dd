"""Arguments and options that several commands share, and the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, then Hydra overrides."),
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
