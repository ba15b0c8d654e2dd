"""The commands about the book itself: list, init, explain."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tunebook.cli.options import NewBase, NewData, NewModel, NewParallelism, Overwrite, RecipesDir
from tunebook.cli.records import make_console
from tunebook.terminal import print_text

book_app = typer.Typer()


@book_app.command(name="list")
def list_recipes(recipes_dir: RecipesDir = None) -> None:
    """List the recipes: title, strategy, reference hardware, evidence."""
    from tunebook.commands.list import recipes_table

    make_console().print(recipes_table(recipes_dir or []))


@book_app.command()
def init(
    name: Annotated[str, typer.Argument(help="The new recipe's name.")],
    model: NewModel = None,
    data: NewData = None,
    parallelism: NewParallelism = None,
    base: NewBase = None,
    overwrite: Overwrite = False,
    recipes_dir: RecipesDir = None,
) -> None:
    """Write a recipe of your own; without --model and --data it asks. It goes to --recipes-dir, or to my_recipes."""
    from tunebook.commands.init import init_command

    init_command(
        name,
        recipes_dir or [],
        make_console(),
        model=model,
        data=data,
        parallelism=parallelism,
        base=base,
        overwrite=overwrite,
        is_terminal=sys.stdin.isatty() and sys.stdout.isatty(),
    )


@book_app.command()
def explain(
    id: Annotated[
        str,
        typer.Argument(
            metavar="RULE|NAME",
            help="A rule's id, which its message ends with (`all` lists them), or another tool's name: lora_r.",
        ),
    ],
) -> None:
    """Say what a rule refuses and why, or what a key of another tool is here."""
    from tunebook.commands.explain import explain as text_of

    print_text(text_of(id), make_console())
