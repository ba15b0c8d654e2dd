"""`verify.html`: the table, both losses on top of each other, and how far apart they are."""

from __future__ import annotations

import math
from pathlib import Path

from tunebook.evidence.tolerances import LOSS, loss_differences
from tunebook.evidence.verifying import Verification
from tunebook.files import atomic_write_text
from tunebook.record.page.charts import Chart, Line, Point
from tunebook.record.page.curves import dash_of_run
from tunebook.record.report import render_page


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
        Line(name=name, points=list(zip(map(float, one.steps), one.losses, strict=True)), colour=index,
             dash=dash_of_run(index))
        for index, (name, one) in enumerate(((f"recorded, {found.name}", expected), (run, results)))
    ]  # fmt: skip
    charts = [Chart(title="Loss", y_label="loss per trained token", lines=lines)]
    if expected.steps == results.steps and any(loss_differences(results, expected)):
        charts.append(_differences(found))
    return charts


def _agreement(found: Verification) -> str:
    """What is said in place of the chart of differences where there is none to draw; empty where there are some."""
    expected, results = found.claim.results, found.results
    if expected.steps != results.steps or any(windows := loss_differences(results, expected)):
        return ""
    return f"The losses do not differ: the means of all {len(windows)} windows of steps agree in every bit."


def _differences(found: Verification) -> Chart:
    """As powers of ten, since both 1e-7 and 1e-2 are of interest; windows that agree in every bit are left out."""
    apart_by_window = loss_differences(found.results, found.claim.results)
    steps, num = found.claim.results.steps, len(apart_by_window)
    points: list[Point] = []
    for index, apart in enumerate(apart_by_window, 1):
        points.append((float(steps[round(index * len(steps) / num) - 1]), math.log10(apart) if apart else None))
    tolerance = found.claim.tolerances[LOSS].value
    return Chart(
        title="Difference of the loss",
        y_label="relative, as a power of ten",
        lines=[Line(name="mean over a window of steps", points=points, colour=1)],
        note=f"A window may differ by {_share(tolerance)}: {_power(tolerance)} on this axis.{_left_out(points)}",
    )


def _share(tolerance: float) -> str:
    return f"{tolerance:.2g}, {100 * tolerance:.2g} %"


def _power(tolerance: float) -> str:
    """Where the tolerance is on the axis; none of one that allows no difference at all."""
    return f"{math.log10(tolerance):.1f}" if tolerance else "below everything"


def _left_out(points: list[Point]) -> str:
    num_equal = sum(y is None for _, y in points)
    return f" {num_equal} of {len(points)} windows agree in every bit and have no point." if num_equal else ""
