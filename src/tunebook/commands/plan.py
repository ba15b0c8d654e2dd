"""`tunebook plan` and `tunebook train --dry-run`: show a run without starting it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from tunebook.commands.train import require_machine, show_decisions, show_job
from tunebook.errors import RequestError
from tunebook.launch.measure import measure, require_measurable
from tunebook.model.load import check_model
from tunebook.plan.advice.changes import FittingChange, changes_that_fit
from tunebook.plan.draft import Draft, draft_json, draft_run, draft_yaml
from tunebook.plan.longest import longest_rows
from tunebook.plan.memory.gpu import judge_measurement, plan_memory
from tunebook.plan.show import host_memory_lines, show_memory, show_warnings, time_lines
from tunebook.record.run_folder import WITHOUT_RECIPE
from tunebook.terminal import print_lines, print_text


def plan_command(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    folder: Path | None = None,
    as_json: bool = False,
    as_yaml: bool = False,
    is_complete: bool = False,
    is_measured: bool = False,
    is_longest: bool = False,
) -> int:
    """Print the choices, the batch, the launch command for `folder`, the memory and the time, or all as JSON.

    `is_complete`: print every choice. With `is_measured`, two steps are trained first unless they are cached. JSON is
    always printed; it includes the problems. With `as_yaml` only the resolved configuration is printed, and warnings go
    to standard error. With `is_longest` the longest rows that fit are printed instead of the plan, and added to the
    JSON. Otherwise raises: RequestError or RulesError for a wrong request, and after printing
    DoesNotFitError for a plan that cannot fit, DataError for missing files.
    """
    draft = draft_run(recipe, overrides, recipes_dirs)
    if is_measured:
        _measure(draft, Console(stderr=True) if as_json else console)
    longest = longest_rows(draft.resolution) if is_longest and draft.memory is not None and draft.resolution else None
    if longest is not None and not as_json:
        draft.raise_errors()
        print_lines(longest.lines(), console)
        return 0
    is_in_doubt = draft.fits is False or (draft.memory is not None and draft.memory.is_in_doubt)
    fitting = changes_that_fit(recipe, overrides, recipes_dirs, draft) if is_in_doubt else []
    if as_json:
        content = draft_json(draft, _advice(fitting, draft)) | {"would_fit": [change.to_json() for change in fitting]}
        content |= {"longest": longest.to_json() if longest is not None else None} if is_longest else {}
        json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
        return draft.exit_code
    draft.raise_errors()
    if as_yaml:
        print(draft_yaml(draft), end="")
        show_warnings(draft.problems, Console(stderr=True, soft_wrap=True))
        draft.raise_if_too_large()
        draft.raise_if_data_is_missing()
        return 0
    assert draft.memory is not None and draft.host is not None and draft.time is not None
    show_decisions(draft, console, is_complete=is_complete)
    show_job(draft, console, folder or Path(draft.config.outputs) / (recipe or WITHOUT_RECIPE) / "<time>")
    if draft.missing_data is not None:
        console.print("note: planned without the data, which is missing")
    show_memory(draft.memory, console)
    print_lines(host_memory_lines(draft.host), console)
    print_lines(time_lines(draft.time), console)
    if is_in_doubt:
        _show_changes(fitting, console, draft)
    draft.raise_if_too_large("what would fit is listed with the plan" if fitting else "no change that was tried would")
    draft.raise_if_data_is_missing()
    return 0


def _measure(draft: Draft, console: Console) -> None:
    """Replace the estimate by two measured steps; if they cannot be trained here, set the draft's error.

    A run that certainly needs too much host memory is not started, since it may take other processes down with it.
    """
    if draft.batch is None or draft.error is not None or (draft.host is not None and draft.host.fits is False):
        return
    assert draft.resolution is not None and draft.machine is not None
    config = draft.resolution.config
    try:
        require_measurable(config)
        require_machine(draft.resolution)
        check_model(config.model)
        measurement = measure(config, draft.batch, draft.machine, console, draft_json(draft))
    except RequestError as error:
        draft.error = error
        return
    draft.memory = judge_measurement(config, plan_memory(config, draft.batch), measurement)


def _show_changes(fitting: list[FittingChange], console: Console, draft: Draft) -> None:
    is_too_large = draft.fits is False
    if fitting:
        is_certain = not is_too_large and all(change.host_fits or not change.is_in_host_memory for change in fitting)
        would = "What would fit for certain" if is_certain else "What would fit"
        print_lines([f"{would}, by estimate, to be typed after the recipe:"], console)
        for change in fitting:
            _show_change(change, console)
    elif is_too_large:
        nothing = _nothing_fits(draft)
        print_lines([nothing[0].upper() + nothing[1:]], console)


def _show_change(change: FittingChange, console: Console) -> None:
    """Print a change on one line; if a terminal is too narrow for it, its effect goes below what is typed."""
    line = f"  {change.line()}"
    if console.is_terminal and len(line) > console.width:
        print_text(f"  {change.typed}", console)
        print_lines([f"      {change.effect}"], console)
    else:
        print_text(line, console)


def _advice(fitting: list[FittingChange], draft: Draft) -> str:
    """Return the result of the search as text, for programs that may show a problem without the rest of the plan."""
    if not fitting:
        return _nothing_fits(draft)
    words = [f"{' '.join(change.change.overrides)}{_without(change)}" for change in fitting]
    return f"what would fit, by estimate: {' or '.join(words)}"


def _without(change: FittingChange) -> str:
    return f" without {' '.join(change.left_out)}" if change.left_out else ""


def _nothing_fits(draft: Draft) -> str:
    """Say what to change if no change of the plan fits, by the memory that is too small."""
    nothing = "none of the changes that were tried makes it fit"
    if draft.memory is not None and draft.memory.fits is not False:
        return (
            f"{nothing}, and what is too small is the host's memory: take nodes with more of it, or fewer GPUs of each "
            "(hardware.gpus_per_node)"
        )
    return (
        f"{nothing}: take more or larger GPUs, a smaller model or, where long documents are what is too much, a "
        "smaller training.max_length"
    )
