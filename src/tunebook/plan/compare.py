"""`tunebook plan RECIPE --compare KEY=a,b,c`: memory and speed for several values of a key."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tunebook.config.override_text import split_values
from tunebook.errors import DataError, RequestError
from tunebook.plan.draft import Draft, draft_run
from tunebook.terminal import print_lines, print_text

_PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "overhead", "total")
_FITS = {True: "yes", False: "no", None: "perhaps"}


def compare_plans(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], compared: list[str], console: Console
) -> int:
    """Print a row for each value; the exit code is that of the best.

    Raises: RequestError if the argument is not one KEY=VALUE,VALUE; DataError if only the data is missing.
    """
    key, separator, listed = compared[0].partition("=")
    values = list(dict.fromkeys(value.strip() for value in split_values(listed)))
    if len(compared) > 1 or not (key and separator and len(values) > 1 and all(values)):
        raise RequestError(
            f"--compare {' --compare '.join(compared)}: it takes one key and at least two values; such as "
            "--compare parallelism=ddp,zero2,zero3,fsdp",
            problem_id="compare-form",
        )
    drafts = {value: draft_run(recipe, [*overrides, f"{key}={value}"], recipes_dirs) for value in values}
    print_text(f"Each GPU or rank (estimated): memory in GiB and tokens/s by {key}", console, style="italic")
    rows = [[key.rpartition(".")[2], *_PARTS, "tokens/s", "fits"]]
    rows += [[value, *_row(draft)] for value, draft in drafts.items()]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        print_text("  ".join(cells), console)
    for value, draft in drafts.items():
        if why := _why_not(draft):
            print_lines([f"{value}: {why[0]}", *(f"  {line}" for line in why[1:])], console)
    code = min(draft.exit_code for draft in drafts.values())
    for draft in drafts.values():
        if code == DataError.exit_code:
            draft.raise_if_data_is_missing()
    return code


def _row(draft: Draft) -> list[str]:
    if draft.memory is None:
        return [*("" for _ in _PARTS), "", "refused"]
    numbers = [getattr(draft.memory.memory, part) for part in _PARTS]
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    cells = ["-" if number is None else f"{number:.1f}" for number in numbers]
    return [*cells, "-" if speed is None else f"{speed:,.0f}", _FITS[draft.fits]]


def _why_not(draft: Draft) -> list[str]:
    """Why a value is refused, or that the host's memory is too small."""
    errors = [problem.text() for problem in draft.problems if problem.is_error]
    if draft.error is not None:
        errors = [draft.error.message]
    if draft.host is not None and draft.host.fits is False:
        return [draft.host.verdict]
    return ["refused", *"\n".join(errors).splitlines()] if errors else []
