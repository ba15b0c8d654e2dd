"""Findings: ok, or a warning or error with its fix. Also how they are printed, grouped by what was checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.errors import Problem, TunebookError
from tunebook.hardware.bandwidth import ALL_GATHER, ALL_REDUCE, Bandwidth
from tunebook.hardware.disk import size_text
from tunebook.hardware.nvidia_smi import Topology


class Level(Enum):
    """The severity; an error means that a run fails or is wrong on this machine."""

    ok = "ok"
    warning = "warning"
    error = "error"


_STYLES = {Level.ok: "green", Level.warning: "yellow", Level.error: "bold red"}


class Kind(Enum):
    """What was checked, in the order in which it is shown."""

    gpus = "gpus"
    software = "software"
    links = "links"
    system = "system"
    storage = "storage"
    recipe = "recipe"
    tokenizer = "tokenizer"

    def ok(self, *, id: str, what: str, data: dict[str, Any] | None = None) -> Finding:
        """A finding without a problem."""
        return Finding(id=id, kind=self, what=what, data=data or {})

    def warning(self, *, id: str, what: str, fix: str, data: dict[str, Any] | None = None) -> Finding:
        """A finding that should be fixed."""
        return Finding(id=id, kind=self, level=Level.warning, what=what, fix=fix, data=data or {})

    def error(self, *, id: str, what: str, fix: str, data: dict[str, Any] | None = None) -> Finding:
        """A finding with which a run fails or is wrong."""
        return Finding(id=id, kind=self, level=Level.error, what=what, fix=fix, data=data or {})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. `tunebook explain` takes its `id`; `data` holds the numbers, with units."""

    id: str
    kind: Kind
    what: str
    level: Level = Level.ok
    fix: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.level is Level.ok) == (self.fix is None), (
            f"{self.id}: warnings and errors have a fix, and nothing else has"
        )

    def to_json(self) -> dict[str, Any]:
        """The finding as `doctor --json` prints it."""
        return {
            "id": self.id,
            "kind": self.kind.value,
            "level": self.level.value,
            "what": self.what,
            "fix": self.fix,
            "data": self.data,
        }


def finding_of(problem: Problem, kind: Kind) -> Finding:
    """A rule's problem as a finding."""
    level = Level.error if problem.is_error else Level.warning
    return Finding(
        id=problem.id,
        kind=kind,
        level=level,
        what=f"{problem.key}: {problem.message}",
        fix=problem.fix,
        data={"key": problem.key},
    )


def finding_of_error(error: TunebookError, kind: Kind, *, otherwise: str) -> Finding:
    """An error as a finding. Its message contains the fix; `otherwise` is the id for an error without one."""
    id = error.problem_id or otherwise
    return Finding(id=id, kind=kind, level=Level.error, what=error.message, fix=f"tunebook explain {id}")


def exit_code_of(findings: list[Finding]) -> int:
    """0 without errors, else 2."""
    return 2 if any(finding.level is Level.error for finding in findings) else 0


def listed(numbers: list[int]) -> str:
    """Numbers as ranges: `0-3, 6`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def show_findings(
    findings: list[Finding], topology: Topology | None, bandwidth: Bandwidth | None, console: Console
) -> None:
    """Print all findings, with the matrix of links and the measured bandwidth below the findings about links."""
    for kind in Kind:
        group = [finding for finding in findings if finding.kind is kind]
        if group:
            console.print(Text(kind.value, style="bold"))
            console.print(_table(group))
        if kind is Kind.links:
            if topology is not None and len(topology.gpus) > 1:
                console.print("how the GPUs are connected", highlight=False)
                console.print(_matrix(topology))
            if bandwidth is not None and bandwidth.measurements:
                how = f"measured by {bandwidth.backend} over {bandwidth.num_ranks} ranks, GB/s"
                console.print(f"{how} (algorithm / bus bandwidth)", highlight=False)
                console.print(_measured(bandwidth))
    console.print(_sum(findings))


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column(width=7)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.what)
        if finding.fix is not None:
            more = f"tunebook explain {finding.id}"
            if finding.fix != more:  # else the message contains the fix
                text.append(f"\nfix: {finding.fix}", style="bold")
            text.append(f"\nmore: {more}", style="dim")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), text)
    return table


def _matrix(topology: Topology) -> Table:
    """The links between GPUs, and each GPU's nearest network card. The JSON has the whole matrix."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("")
    names = [gpu.name for gpu in topology.gpus]
    for name in names:
        table.add_column(name.removeprefix("GPU"), justify="right")
    table.add_column("NUMA", justify="right")
    if topology.cards:
        table.add_column("card", overflow="fold")
    interfaces = {card.name: card.interface or card.name for card in topology.cards}
    for gpu in topology.gpus:
        cells = ["-" if gpu.name == other else topology.connections[gpu.name, other].text for other in names]
        cells.append(gpu.numa or "?")
        if (nearest := topology.nearest_card(gpu.name)) is not None:
            cells.append(f"{interfaces[nearest[0]]} {nearest[1].text}")
        table.add_row(gpu.name, *cells)
    return table


def _measured(bandwidth: Bandwidth) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in ("size", "all-reduce", "all-gather"):
        table.add_column(column, justify="right")
    for size in sorted({one.bytes for one in bandwidth.measurements}):
        cells = []
        for operation in (ALL_REDUCE, ALL_GATHER):
            found = [one for one in bandwidth.measurements if (one.operation, one.bytes) == (operation, size)]
            cells.append(f"{found[0].algorithm_gb_per_s:.3g} / {found[0].bus_gb_per_s:.3g}" if found else "-")
        table.add_row(size_text(size), *cells)
    return table


def _sum(findings: list[Finding]) -> Text:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    text = Text()
    for level, name in ((Level.error, "error"), (Level.warning, "warning")):
        plural = "" if counts[level] == 1 else "s"
        text.append(f"{counts[level]} {name}{plural}", style=_STYLES[level] if counts[level] else "")
        text.append(", ")
    return text.append(f"{counts[Level.ok]} ok")
