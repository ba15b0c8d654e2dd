"""`tunebook plan` and `tunebook train --dry-run`: show a run without starting it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tunebook.commands.preflight import require_machine
from tunebook.commands.train import show_decisions, show_job
from tunebook.errors import RequestError
from tunebook.launch.measure import measure, require_measurable
from tunebook.model.load import check_model
from tunebook.plan.alternatives import LongestRow, Suggestion, longest_row, suggest
from tunebook.plan.draft import Draft, draft_json, draft_run, draft_yaml
from tunebook.plan.memory.verdict import judge_measurement, plan_memory
from tunebook.plan.show import host_memory_lines, memory_lines, show_warnings, time_lines
from tunebook.record.run_folder import run_name
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
    is_measured: bool = False,
    is_longest: bool = False,
) -> int:
    """Print the choices, the batch, the launch command for `folder`, the memory and the time, or all as JSON.

    With `is_measured`, two steps are trained first unless they are cached. JSON is always printed; it includes the
    problems. With `as_yaml` only the resolved configuration is printed, and warnings go to standard error. With
    `is_longest` the longest row that fits is printed instead of the plan, and added to the JSON. Otherwise raises:
    RequestError or RulesError for a wrong request, and after printing DoesNotFitError for a plan that cannot fit,
    DataError for missing files.
    """
    draft = draft_run(recipe, overrides, recipes_dirs)
    if is_measured:
        _measure(draft, Console(stderr=True) if as_json else console)
    if is_longest and not as_json:
        draft.raise_errors()
        _show_longest(longest_row(draft), draft, console)
        return 0
    is_in_doubt = draft.fits is False or (draft.memory is not None and draft.memory.is_in_doubt)
    suggested = suggest(draft) if is_in_doubt and not as_yaml else []
    if as_json:
        content = draft_json(draft)
        content["would_fit"] = [
            {"overrides": suggestion.overrides, "total_gib": round(suggestion.total_gib, 3)}
            for suggestion in suggested
            if suggestion.fits
        ]
        if is_longest:
            longest = longest_row(draft) if draft.memory is not None else None
            content["longest"] = None if longest is None else asdict(longest)
        json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
        return draft.exit_code
    draft.raise_errors()
    if as_yaml:
        print(draft_yaml(draft), end="")
        show_warnings(draft.problems, Console(stderr=True, soft_wrap=True))
        return _end(draft)
    assert draft.memory is not None and draft.host is not None and draft.time is not None
    show_decisions(draft, console)
    show_job(draft, console, folder or Path(draft.config.outputs) / run_name(draft.config) / "<time>")
    if draft.missing_data is not None:
        console.print("note: planned without the data, which is missing")
    lines = [*memory_lines(draft.memory), *host_memory_lines(draft.host), *time_lines(draft.time)]
    print_lines(lines, console)
    if is_in_doubt:
        _show_suggestions(suggested, console)
    return _end(draft)


def _end(draft: Draft) -> int:
    """Return 0. Raises: DoesNotFitError or DataError for a plan that cannot be trained."""
    if draft.shortcomings:
        raise draft.shortcomings[0]
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


def _show_longest(row: LongestRow | None, draft: Draft, console: Console) -> None:
    hardware, group = draft.config.hardware, draft.config.parallelism.sequence_group_size
    if row is None:
        print_text("Longest row: not known; the model's size or hardware.memory_gib is unknown", console)
        return
    shared = f" shared by {group} GPUs" if group > 1 else ""
    length = f"{row.tokens:,} tokens" if row.tokens else "none fits"
    end = ", all positions of the model" if row.has_all_positions else ""
    title = f"Longest row{shared} (estimated, one document in each row, {hardware.memory_gib:g} GiB a GPU)"
    print_lines([f"{title}: {length}{end}", *([f"  {' '.join(row.overrides)}"] if row.tokens else [])], console)


def _show_suggestions(suggested: list[Suggestion], console: Console) -> None:
    if any(suggestion.fits for suggestion in suggested):
        print_text("What would fit, by estimate, to be typed after the recipe:", console)
    elif suggested:
        print_text("Nothing that was tried fits for certain; the least memory takes:", console)
    for suggestion in suggested:
        print_text(f"  {' '.join(suggestion.overrides)}   ({suggestion.total_gib:.1f} GiB)", console)
