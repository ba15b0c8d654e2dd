"""The findings on a terminal: grouped by what was looked at, with the fix below what is wrong."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.doctor.findings import Finding, Kind, Level, size_text
from tunebook.hardware.bandwidth import ALL_GATHER, ALL_REDUCE, Bandwidth
from tunebook.hardware.nvidia_smi import Topology

_STYLES = {Level.ok: "green", Level.warning: "yellow", Level.error: "bold red"}


def show_findings(
    findings: list[Finding], topology: Topology | None, bandwidth: Bandwidth | None, console: Console
) -> None:
    """Everything that was found, with the matrix of links and what was measured under the findings about links."""
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
            if finding.fix != more:  # else what to do is in the message
                text.append(f"\nfix: {finding.fix}", style="bold")
            text.append(f"\nmore: {more}", style="dim")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), text)
    return table


def _matrix(topology: Topology) -> Table:
    """GPUs against GPUs, and each one's nearest network card; the rest of the matrix is in the JSON."""
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
