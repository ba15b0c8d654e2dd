"""`tunebook plan RECIPE --compare KEY=A,B,C`: the plan's memory and speed for several values of a key."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tunebook.config.compose import parse_override
from tunebook.errors import DataError, RequestError
from tunebook.plan.draft import Draft, draft_run
from tunebook.plan.show import about
from tunebook.terminal import print_text

_FITS = {True: "yes", False: "no", None: "perhaps"}


def compare_plans(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], compared: list[str], console: Console
) -> int:
    """Print a row for each value; the exit code is that of the best.

    Raises: RequestError if the argument is not one KEY=VALUE,VALUE; DataError if only the data is missing.
    """
    override = parse_override(compared[0])
    key = override.key_or_group
    values = list(dict.fromkeys(override.sweep_string_iterator())) if override.is_choice_sweep() else []
    if len(compared) > 1 or len(values) < 2:
        example = "--compare takes one key and at least two values, such as --compare parallelism=ddp,zero2,zero3,fsdp"
        raise RequestError(example, problem_id="compare-form")
    drafts = {value: draft_run(recipe, [*overrides, f"{key}={value}"], recipes_dirs) for value in values}
    rows = [[key.rpartition(".")[2], "GiB", "tokens/s", "fits"]]
    rows += [[value, *_row(draft)] for value, draft in drafts.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print_text("Each GPU or rank, by estimate", console, style="italic")
    for value, gib, speed, fits in rows:
        print_text(f"{value:<{widths[0]}}  {gib:>{widths[1]}}  {speed:>{widths[2]}}  {fits}", console)
    best = min(drafts.values(), key=lambda draft: draft.exit_code)
    if best.exit_code == DataError.exit_code and best.missing_data is not None:
        raise best.missing_data
    return best.exit_code


def _row(draft: Draft) -> list[str]:
    if draft.memory is None:
        rules = ", ".join(problem.id for problem in draft.problems if problem.is_error)
        return ["-", "-", f"refused: {draft.error.message if draft.error else rules}"]
    total = draft.memory.total
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    return ["-" if total is None else f"{total:.1f}", "-" if speed is None else about(speed), _FITS[draft.fits]]
