"""`tunebook doctor`: check this machine, and whether a recipe can run on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.book import resolve_path
from tunebook.config.schema import starts_elsewhere
from tunebook.doctor.checks import (
    Finding,
    check_disks,
    check_driver,
    check_image,
    check_links,
    check_nccl,
    check_shared_memory,
    check_torch,
    finding_of,
)
from tunebook.errors import counted
from tunebook.plan.draft import Draft, draft_run

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], console: Console, *, as_json: bool = False
) -> int:
    """Check this machine, and a recipe if one is named; return 0 without errors, else 2."""
    findings = []
    for finding in diagnose(recipe, overrides, recipes_dirs):
        findings.append(finding)
        if not as_json:
            console.print(_line(finding))
    counts = {level: sum(finding.level == level for finding in findings) for level in _STYLES}
    if as_json:
        fields = ("id", "level", "what", "fix")
        rows = [{name: getattr(finding, name) for name in fields} for finding in findings]
        json.dump({"findings": rows}, sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        console.print(f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}", highlight=False)
    return 2 if counts["error"] else 0


def diagnose(recipe: str | None, overrides: list[str], recipes_dirs: list[Path]) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known."""
    machine, driver = check_driver()
    yield driver
    names_run = recipe is not None or any(word.lstrip("+").startswith("model") for word in overrides)
    draft = draft_run(recipe, overrides, recipes_dirs, machine) if names_run else None
    yield from check_image(machine, draft.resolution.config if draft and draft.resolution else None)
    torch = check_torch(machine)
    yield torch
    if (links := check_links(machine)) is not None:
        yield links
        if not torch.is_error:
            yield check_nccl(len(machine.gpus))
    yield check_shared_memory(len(machine.gpus))
    outputs = [word.removeprefix("outputs=") for word in overrides if word.startswith("outputs=")]
    yield from check_disks(resolve_path(outputs[-1] if outputs else "outputs"))
    if draft is not None:
        yield from _findings_of(draft)


def _findings_of(draft: Draft) -> Iterator[Finding]:
    """Yield what is wrong with the named run; one finding if nothing is."""
    yield from map(finding_of, draft.problems)
    for error in [draft.error] if draft.error else draft.shortcomings:
        fix = "change the request as the error says"
        yield Finding(id=error.problem_id or "recipe", what=error.message, fix=fix, is_error=True)
    if draft.exit_code == 0:
        config = draft.config
        hardware = config.hardware
        what = f"{config.recipe or 'the request'} composes for {hardware.num_nodes} x {hardware.gpus_per_node} "
        what += f"{hardware.generation.name}, and no rule forbids it"
        if starts_elsewhere(config) or hardware.num_nodes > 1:
            what += "; other machines that it runs on were not checked: tunebook doctor on each"
        yield Finding(id="recipe", what=what)


def _line(finding: Finding) -> Table:
    text = Text(finding.what)
    if finding.fix is not None:
        text.append(f"\nfix: {finding.fix} [{finding.id}]", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=7)
    table.add_column(overflow="fold")
    table.add_row(Text(finding.level, style=_STYLES[finding.level]), text)
    return table
