"""`tunebook plan` and `tunebook train --dry-run`: show a run without starting it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tunebook.commands.preflight import require_machine
from tunebook.config.choices import Generation
from tunebook.config.frozen import config_to_yaml
from tunebook.config.launchers import SlurmConfig
from tunebook.errors import DataError, RequestError
from tunebook.facts.strategies import strategy_facts
from tunebook.launch.commands import launch_command, ranks_command, show_command, uses_srun
from tunebook.launch.measure import measure, require_measurable
from tunebook.launch.slurm import JOB_SCRIPT, job_script
from tunebook.model.load import check_model
from tunebook.plan.alternatives import LongestRow, longest_row, show_plans, suggest
from tunebook.plan.draft import Draft, draft_json, draft_run
from tunebook.plan.memory.verdict import judge_measurement, plan_memory
from tunebook.plan.show import show_plan, show_warnings
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
    with_reasons: bool = False,
) -> int:
    """Print whether the run fits, its batch, time, memory, choices and launch command for `folder`, or all as JSON.

    With `is_measured`, two steps are trained first unless they are cached. JSON is always printed; it includes the
    problems. With `as_yaml` only the resolved configuration is printed, and warnings go to standard error. With
    `is_longest` the longest row that fits is printed instead of the plan, and added to the JSON. Raises: RequestError
    or RulesError for a wrong request, and after printing DataError for missing files.
    """
    draft = draft_run(recipe, overrides, recipes_dirs)
    if is_measured:
        _measure(draft, Console(stderr=True) if as_json else console)
    if is_longest and not as_json:
        draft.raise_errors()
        _show_longest(longest_row(draft), draft, console)
        return 0
    is_short_of_memory = draft.memory is not None and (draft.fits is False or draft.tightest.is_tight)
    suggested = suggest(draft) if is_short_of_memory and not as_yaml else {}
    if as_json:
        content = draft_json(draft)
        content["would_fit"] = [
            {"overrides": words.split(), "total_gib": tried.memory.to_json()["total"]}
            for words, tried in suggested.items()
            if tried.memory is not None and tried.fits
        ]
        if is_longest:
            longest = longest_row(draft) if draft.memory is not None else None
            content["longest"] = None if longest is None else asdict(longest)
        json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
        return draft.exit_code
    draft.raise_errors()
    if as_yaml:
        print(config_to_yaml(draft.config), end="")
        show_warnings(draft.problems, Console(stderr=True, soft_wrap=True))
    else:
        show_plan(draft, console, with_reasons=with_reasons)
        show_launch(draft, console, folder or Path(draft.config.outputs) / run_name(draft.config) / "<time>")
        if suggested:
            found = any(tried.fits for tried in suggested.values())
            title = "What would fit, added to the same command:"
            print_text(title if found else "Nothing that was tried fits; the least memory takes:", console)
            show_plans(suggested, console)
        _show_other_hardware(draft, console)
    for error in draft.shortcomings[:1]:
        if as_yaml or isinstance(error, DataError):  # a plan opens with the other one
            raise error
    return draft.exit_code


def show_launch(draft: Draft, console: Console, folder: Path) -> None:
    """Print the launch command; for a Slurm job also its script."""
    config = draft.config
    show_command(launch_command(config, folder), console)
    if isinstance(config.launcher, SlurmConfig):
        print_text(f"{folder / JOB_SCRIPT}:\n{job_script(config, folder)}".rstrip(), console)
        if uses_srun(config):
            show_command(ranks_command(config, folder), console, "in the job")


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


def _show_other_hardware(draft: Draft, console: Console) -> None:
    """On a machine without a GPU, print what to type for a plan on another."""
    assert draft.composition is not None
    if draft.config.hardware.generation is Generation.cpu and draft.machine is not None and not draft.machine.gpus:
        needs_one = strategy_facts(draft.composition.config).runs_on_one  # as typed: auto may choose another for two
        gpus = "" if needs_one else " hardware.gpus_per_node=2"
        print_text(f"plan for another machine: hardware=hopper{gpus}", console)
