"""`tunebook list`: the recipes."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from tunebook.config.book import find_recipes
from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.evidence.card import listed


def recipes_table(recipes_dirs: list[Path]) -> Table:
    """A row per recipe; one that does not compose shows its error."""
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)  # a wrapped or cut name cannot be typed
    for column in ("title", "strategy", "reference hardware", "evidence"):
        table.add_column(column, overflow="fold")
    for name, file in find_recipes(recipes_dirs).items():
        try:
            config = compose(name, [], recipes_dirs).config
        except RequestError as error:
            table.add_row(*map(Text, (name, f"does not compose: {error.message.splitlines()[0]}", "", "", "")))
            continue
        hardware, reference = config.hardware, config.hardware.reference
        nodes = f"{hardware.num_nodes} nodes x " if hardware.num_nodes > 1 else ""
        machine = f"{nodes}{reference.gpus_per_node} x {reference.generation.name}"
        evidence = listed(sorted((file.parent / file.stem / "evidence").glob("*.json")))
        cells = (name, config.title, config.parallelism.strategy.name, machine, evidence)
        table.add_row(*map(Text, cells))  # a title may hold brackets
    return table
