"""`tunebook list`: what recipes there are."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from tunebook.config.book import find_recipes
from tunebook.config.compose import compose
from tunebook.config.schema import ReferenceHardware, RunConfig
from tunebook.errors import RequestError


def recipes_table(recipes_dirs: list[Path]) -> Table:
    """A line per recipe; one that does not compose says so instead of hiding."""
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)  # in pieces or cut it cannot be typed
    for column in ("title", "strategy", "reference hardware", "evidence"):
        table.add_column(column, overflow="fold")
    for name, file in find_recipes(recipes_dirs).items():
        try:
            config = compose(name, [], recipes_dirs).config
        except RequestError as error:
            table.add_row(*map(Text, (name, f"does not compose: {error.message.splitlines()[0]}", "", "", "")))
            continue
        strategy = config.parallelism.strategy.name
        cells = (name, config.title, strategy, reference_hardware(config), evidence(file))
        table.add_row(*map(Text, cells))  # a title may hold brackets
    return table


def reference_hardware(config: RunConfig) -> str:
    """The machine the recipe's source used, such as `8 x volta`."""
    reference: ReferenceHardware = config.hardware.reference
    nodes = f"{config.hardware.num_nodes} nodes x " if config.hardware.num_nodes > 1 else ""
    return f"{nodes}{reference.gpus_per_node} x {reference.generation.name}"


def evidence(recipe_file: Path) -> str:
    """The labels of the recorded evidence, or `none yet`."""
    files = sorted((recipe_file.parent / recipe_file.stem / "evidence").glob("*.json"))
    return ", ".join(file.stem for file in files) or "none yet"
