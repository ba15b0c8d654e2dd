"""`tunebook doctor`: check this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.doctor.checks import (
    Finding,
    check_disks,
    check_driver,
    check_image,
    check_links,
    check_nccl,
    check_shared_memory,
    check_torch,
)
from tunebook.errors import counted

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(outputs: Path, console: Console) -> int:
    """Check this machine, with the disk of `outputs`; return 0 without errors, else 2."""
    findings = []
    for finding in diagnose(outputs):
        findings.append(finding)
        console.print(_line(finding))
    counts = {level: sum(finding.level == level for finding in findings) for level in _STYLES}
    console.print(f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}", highlight=False)
    return 2 if counts["error"] else 0


def diagnose(outputs: Path) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known."""
    machine, driver = check_driver()
    yield driver
    yield from check_image(machine)
    torch = check_torch(machine)
    yield torch
    if (links := check_links(machine)) is not None:
        yield links
        if not torch.is_error:
            yield check_nccl(len(machine.gpus))
    yield check_shared_memory(len(machine.gpus))
    yield from check_disks(outputs)


def _line(finding: Finding) -> Table:
    text = Text(finding.what)
    if finding.fix is not None:
        text.append(f"\nfix: {finding.fix} [{finding.id}]", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=7)
    table.add_column(overflow="fold")
    table.add_row(Text(finding.level, style=_STYLES[finding.level]), text)
    return table
