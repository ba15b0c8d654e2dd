"""The result of a verification: printed, and drawn as `verify.html` with the losses and their differences."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console

from tunebook.evidence.tolerances import LOSS, loss_differences
from tunebook.evidence.verifying import Verification
from tunebook.files import atomic_write_text
from tunebook.record.page.charts import Chart, Line, Point
from tunebook.record.page.curves import dash_of_run
from tunebook.record.report import render_page
from tunebook.terminal import print_text

PAGE_FILE = "verify.html"


def show_verification(found: Verification, console: Console) -> int:
    """Print the table and write the page; returns the exit code."""
    console.print(found.table())
    page = write_page(found, console)
    verdict = "agrees with" if found.exit_code == 0 else "DIFFERS from"
    drawn = "" if page is None else f"; drawn in {page}"
    print_text(f"the run {verdict} {found.claim.name}{drawn}", console)
    return found.exit_code


def write_page(found: Verification, console: Console) -> Path | None:
    """Write the page into the run's folder; None, with a warning, if it cannot be written."""
    charts, agreement = _charts(found)
    page = render_page(
        "verify.html.jinja",
        beside=Path(__file__).parent,
        run=found.run.record.name,
        claim=found.claim,
        here=found.run.hardware,
        rows=[row.to_json() for row in found.rows],
        agrees=found.exit_code == 0,
        charts=charts,
        agreement=agreement,
    )
    file = found.run.record.folder / PAGE_FILE
    try:
        atomic_write_text(file, page)
    except OSError as error:
        warning = f"warning: {file} cannot be written: {error.strerror or error}"
        print_text(warning, console, style="yellow")
        return None
    return file


def _charts(found: Verification) -> tuple[list[Chart], str]:
    """Return the losses and their differences, and the sentence that replaces the differences if there are none."""
    expected, results = found.claim.results, found.run.results
    lines = [
        Line(name=name, points=list(zip(map(float, one.steps), one.losses, strict=True)), color=index,
             dash=dash_of_run(index))
        for index, (name, one) in enumerate(
            ((f"recorded, {found.claim.name}", expected), (found.run.record.name, results))
        )
    ]  # fmt: skip
    losses = Chart(title="Loss", y_label="loss per trained token", lines=lines)
    if expected.steps != results.steps:
        return [losses], ""
    differences = loss_differences(results, expected)
    if any(differences):
        return [losses, _differences(differences, expected.steps, found.claim.tolerances[LOSS].value)], ""
    return [
        losses
    ], f"The losses do not differ: the means of all {len(differences)} windows of steps are bitwise equal."


def _differences(differences: list[float], steps: list[int], tolerance: float) -> Chart:
    """Plot the differences as powers of ten, since they range from 1e-7 to 1e-2. Equal windows are omitted."""
    num, num_equal = len(differences), differences.count(0.0)
    points: list[Point] = [
        (float(steps[round(index * len(steps) / num) - 1]), math.log10(difference) if difference else None)
        for index, difference in enumerate(differences, 1)
    ]
    power = f"{math.log10(tolerance):.1f}" if tolerance else "below everything"
    note = f"A window may differ by {tolerance:.2g}, {100 * tolerance:.2g} %: {power} on this axis."
    if num_equal:
        note += f" {num_equal} of {num} windows are bitwise equal and have no point."
    return Chart(
        title="Difference of the loss",
        y_label="relative, as a power of ten",
        lines=[Line(name="mean over a window of steps", points=points, color=1)],
        note=note,
    )
