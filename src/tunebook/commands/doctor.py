"""`tunebook doctor`: check this machine, and whether a recipe can run on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.book import resolve_path
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig, starts_elsewhere
from tunebook.data.batch import solve_batch
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
from tunebook.errors import RequestError, RulesError
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The recipe as far as it composes for this machine; `config` is None if no run was named."""

    config: RunConfig | None = None
    outputs: str = "outputs"
    findings: list[Finding] = field(default_factory=list)


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
        console.print(f"{counts['error']} errors, {counts['warning']} warnings", highlight=False)
    return 2 if counts["error"] else 0


def diagnose(recipe: str | None, overrides: list[str], recipes_dirs: list[Path]) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known."""
    machine, driver = check_driver()
    yield driver
    request = _resolve(recipe, overrides, recipes_dirs, machine)
    yield from check_image(machine, request.config)
    torch = check_torch(machine)
    yield torch
    if (links := check_links(machine)) is not None:
        yield links
        if not torch.is_error:
            yield check_nccl(len(machine.gpus))
    yield check_shared_memory(len(machine.gpus))
    yield from check_disks(resolve_path(request.outputs))
    yield from request.findings


def _resolve(recipe: str | None, overrides: list[str], recipes_dirs: list[Path], machine: Machine) -> _Request:
    """Compose and check the named run; its problems become findings."""
    if recipe is None and not overrides:
        return _Request()
    config, findings = None, []
    try:
        composition = compose(recipe, overrides, recipes_dirs)
        outputs = composition.config.outputs
        if recipe is None and not any(word.lstrip("+").startswith("model") for word in overrides):
            return _Request(outputs=outputs)  # such as `outputs=FOLDER`: only the machine is checked
        config = resolve_auto(composition.config, machine).config
        findings = [finding_of(problem) for problem in check(config, composition.set_by)]
        if not any(finding.is_error for finding in findings):
            solve_batch(config, None)
            findings.append(_fitting(config))
        return _Request(config=config, outputs=outputs, findings=findings)
    except RulesError as error:
        findings += map(finding_of, error.problems)
    except RequestError as error:
        id = error.problem_id or "recipe"
        findings.append(Finding(id=id, what=error.message, fix="change the request as said above", is_error=True))
    return _Request(config=config, findings=findings)


def _fitting(config: RunConfig) -> Finding:
    hardware = config.hardware
    what = f"{config.recipe or 'the request'} composes for {hardware.num_nodes} x {hardware.gpus_per_node} "
    what += f"{hardware.generation.name}, and no rule forbids it"
    if starts_elsewhere(config) or hardware.num_nodes > 1:
        what += "; other machines that it runs on were not checked: tunebook doctor on each"
    return Finding(id="recipe", what=what)


def _line(finding: Finding) -> Table:
    text = Text(finding.what)
    if finding.fix is not None:
        text.append(f"\nfix: {finding.fix} [{finding.id}]", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=7)
    table.add_column(overflow="fold")
    table.add_row(Text(finding.level, style=_STYLES[finding.level]), text)
    return table
