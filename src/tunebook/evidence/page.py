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
from tunebook.record.run_record import RunRecord
from tunebook.terminal import print_text

PAGE_FILE = "verify.html"


def show_verification(found: Verification, record: RunRecord, console: Console) -> int:
    """Print the table and write the page; returns the exit code."""
    console.print(found.table())
    page = draw_page(found, record, console)
    verdict = "agrees with" if found.exit_code == 0 else "DIFFERS from"
    drawn = "" if page is None else f"; drawn in {page}"
    print_text(f"the run {verdict} {found.name}{drawn}", console)
    return found.exit_code


def draw_page(found: Verification, record: RunRecord, console: Console) -> Path | None:
    """Write the page into the run's folder; None, with a warning, if it cannot be written."""
    page = record.folder / PAGE_FILE
    try:
        write_page(found, record.name, page)
    except OSError as error:
        warning = f"warning: {page} cannot be written: {error.strerror or error}"
        print_text(warning, console, style="yellow")
        return None
    return page


def write_page(found: Verification, run: str, file: Path) -> None:
    """Write the page of one verification."""
    page = render_page(
        "verify.html.jinja",
        beside=Path(__file__).parent,
        run=run,
        name=found.name,
        what=found.what,
        hardware=found.claim.hardware,
        here=found.hardware,
        rows=[row.to_json() for row in found.rows],
        agrees=found.exit_code == 0,
        charts=_charts(found, run),
        agreement=_agreement(found),
    )
    atomic_write_text(file, page)


def _charts(found: Verification, run: str) -> list[Chart]:
    expected, results = found.claim.results, found.results
    lines = [
        Line(name=name, points=list(zip(map(float, one.steps), one.losses, strict=True)), color=index,
             dash=dash_of_run(index))
        for index, (name, one) in enumerate(((f"recorded, {found.name}", expected), (run, results)))
    ]  # fmt: skip
    charts = [Chart(title="Loss", y_label="loss per trained token", lines=lines)]
    if expected.steps == results.steps and any(loss_differences(results, expected)):
        charts.append(_differences(found))
    return charts


def _agreement(found: Verification) -> str:
    """Return the sentence that replaces the chart of differences if there are none; else empty."""
    expected, results = found.claim.results, found.results
    if expected.steps != results.steps or any(windows := loss_differences(results, expected)):
        return ""
    return f"The losses do not differ: the means of all {len(windows)} windows of steps are bitwise equal."


def _differences(found: Verification) -> Chart:
    """Plot the differences as powers of ten, since they range from 1e-7 to 1e-2. Equal windows are omitted."""
    differences = loss_differences(found.results, found.claim.results)
    steps, num = found.claim.results.steps, len(differences)
    points: list[Point] = [
        (float(steps[round(index * len(steps) / num) - 1]), math.log10(difference) if difference else None)
        for index, difference in enumerate(differences, 1)
    ]
    tolerance, num_equal = found.claim.tolerances[LOSS].value, differences.count(0.0)
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
