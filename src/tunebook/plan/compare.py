"""`tunebook plan RECIPE --compare KEY=a,b,c`: memory and speed for several values of a key."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tunebook.config.override_text import split_values
from tunebook.errors import DataError, RequestError
from tunebook.plan.draft import Draft, draft_run
from tunebook.terminal import print_lines, print_text

_PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "overhead", "total")
_UNBOUNDED = 1000  # columns, wider than any table


def compare_plans(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], compared: str, console: Console
) -> int:
    """Print a row for each value; the exit code is 0 if any of them can run.

    Raises: RequestError if the argument is not KEY=VALUE,VALUE; DataError if only the data is missing.
    """
    key, values = split_compared(compared)
    drafts = {value: draft_run(recipe, [*overrides, f"{key}={value}"], recipes_dirs) for value in values}
    title = f"Each GPU or rank (estimated): memory in GiB and tokens/s by {key}"
    print_text(title, console, style="italic")
    table = _table(key, drafts, _PARTS)
    unbounded = console.options.update(max_width=_UNBOUNDED)
    if (width := Measurement.get(console, unbounded, table).maximum) > console.width:
        table = _table(key, drafts, _PARTS[-1:])
        console.print(Text(f"(its parts are shown in a terminal of {width} columns)"))
    console.print(table)
    for said, alike in _notes(drafts).items():
        print_lines(f"{', '.join(alike)}: {said}".splitlines(), console)
    code = min(draft.exit_code for draft in drafts.values())
    for draft in drafts.values():
        if code == DataError.exit_code:
            draft.raise_if_data_is_missing()
    return code


def _table(key: str, drafts: dict[str, Draft], parts: tuple[str, ...]) -> Table:
    """A row for each value with the given memory parts. Nothing wraps, to keep numbers and names intact."""
    table = Table(box=None, pad_edge=False)
    table.add_column(key.rpartition(".")[2], no_wrap=True)
    for name in (*parts, "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for value, draft in drafts.items():
        table.add_row(Text(value), *_row(draft, parts))  # a list's brackets are not markup
    return table


def _notes(drafts: dict[str, Draft]) -> dict[str, list[str]]:
    """Notes by text, with their values: why a value is refused, host memory too small, or a measurement's date."""
    notes: dict[str, list[str]] = {}
    for value, draft in drafts.items():
        errors = _errors(draft)
        if errors:
            notes.setdefault("refused\n" + "\n".join(f"  {error}" for error in errors), []).append(value)
        elif draft.host is not None and draft.host.fits is False:
            notes.setdefault(draft.host.verdict, []).append(value)
        elif draft.memory is not None and draft.memory.measured is not None:
            notes.setdefault(f"measured on {draft.memory.measured.date}", []).append(value)
    return notes


def _errors(draft: Draft) -> list[str]:
    """All messages that refuse a run."""
    if draft.error is not None:
        return [draft.error.message]
    return [problem.text() for problem in draft.problems if problem.is_error]


def only_comparison(typed: list[str]) -> str:
    """Return the single --compare argument.

    Raises: RequestError for several: a table has one key, and the others would be lost.
    """
    if len(typed) > 1:
        *others, last = typed
        fixed = " ".join(f"{key}={values[0]}" for key, values in map(split_compared, others))
        raise RequestError(
            f"--compare is given {len(typed)} times, and a table has rows by one key; type a value of each other one, "
            f"such as {fixed} --compare {last}, and the same again with another value",
            problem_id="compare-form",
        )
    return typed[0]


def split_compared(compared: str) -> tuple[str, list[str]]:
    """Return the key and its values. Raises: RequestError with an example."""
    key, separator, listed = compared.partition("=")
    values = [value.strip() for value in split_values(listed)]
    if not key or not separator or len(values) < 2 or not all(values):
        raise RequestError(
            f"--compare={compared}: it takes a key and at least two values; such as "
            "--compare parallelism=ddp,zero2,zero3,fsdp",
            problem_id="compare-form",
        )
    if len(set(values)) < len(values):
        raise RequestError(f"--compare={compared}: a value is repeated; name each once", problem_id="compare-form")
    return key.strip(), values


def _row(draft: Draft, parts: tuple[str, ...]) -> list[str | Text]:
    if _errors(draft):
        return [*("" for _ in parts), "", Text("refused", style="red")]
    assert draft.memory is not None
    numbers = [getattr(draft.memory.memory, part) for part in parts]
    answer = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("perhaps", style="yellow")}
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    return [
        *("-" if number is None else f"{number:.1f}" for number in numbers),
        "-" if speed is None else f"{speed:,.0f}",
        answer[draft.fits],
    ]
