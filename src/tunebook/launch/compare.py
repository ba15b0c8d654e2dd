"""`tunebook plan RECIPE --compare KEY=a,b,c`: the memory and the speed of several answers to a question."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.override_text import split_values
from tunebook.errors import RequestError
from tunebook.launch.draft import Draft, draft_run

_PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "overhead", "total")


def compare_plans(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], compared: str, console: Console
) -> int:
    """Print a row for each value; the exit code is 0 as soon as one of them can run.

    Raises: RequestError for what is no KEY=VALUE,VALUE.
    """
    key, values = split_compared(compared)
    drafts = {value: draft_run(recipe, [*overrides, f"{key}={value}"], recipes_dirs) for value in values}
    table = Table(
        title=f"Each GPU or rank (estimated): memory in GiB and tokens/s by {key}", title_justify="left", box=None
    )
    table.add_column(key.rpartition(".")[2], overflow="fold")
    for part in _PARTS:
        table.add_column(part, justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("fits", overflow="fold")
    for value, draft in drafts.items():
        table.add_row(Text(value), *_row(draft))  # a list's brackets are not markup
    console.print(table)
    return min(draft.exit_code for draft in drafts.values())


def split_compared(compared: str) -> tuple[str, list[str]]:
    """The key and its values. Raises: RequestError with an example."""
    key, separator, listed = compared.partition("=")
    values = [value.strip() for value in split_values(listed)]
    if not key or not separator or len(values) < 2 or not all(values):
        raise RequestError(
            f"--compare={compared}: it takes a key and at least two values; such as "
            "--compare parallelism=ddp,zero2,zero3,fsdp",
            problem_id="compare-form",
        )
    if len(set(values)) < len(values):
        raise RequestError(f"--compare={compared}: a value is there twice; name each once", problem_id="compare-form")
    return key.strip(), values


def _row(draft: Draft) -> list[str | Text]:
    errors = [problem for problem in draft.problems if problem.is_error]
    if draft.error is not None or errors:
        said = errors[0].message if errors else str(draft.error)
        return [*("" for _ in _PARTS), "", Text(f"refused: {said}", style="red")]
    assert draft.memory is not None
    memory, fits = draft.memory.memory, draft.memory.fits
    numbers = [getattr(memory, part) for part in _PARTS]
    answer = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("perhaps", style="yellow")}
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    return [
        *("-" if number is None else f"{number:.1f}" for number in numbers),
        "-" if speed is None else f"{speed:,.0f}",
        answer[fits],
    ]
