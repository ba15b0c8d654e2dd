"""Draw the page of a parity: each configuration's losses and their differences from the reference's."""

from __future__ import annotations

import math
from pathlib import Path

from tunebook.files import atomic_write_text
from tunebook.parity.result import CaseResult, verdict
from tunebook.record.page.charts import Chart, Line
from tunebook.record.page.curves import dash_of_run
from tunebook.record.report import render_page


def write_page(results: list[CaseResult], tolerance: float, recipe: str, file: Path) -> None:
    """Write the page of the results; the first is the reference."""
    ran = [result for result in results if result.losses]
    rows = [(result, verdict(result, tolerance, is_reference=index == 0)) for index, result in enumerate(results)]
    page = render_page(
        "parity.html.jinja",
        beside=Path(__file__).parent,
        recipe=recipe,
        reference=results[0].case.name,
        allowed=f"may differ by {tolerance:g} of their value" if tolerance else "must be equal",
        rows=rows,
        charts=[_losses(ran), _differences(ran[1:], tolerance)],
    )
    atomic_write_text(file, page)


def _losses(ran: list[CaseResult]) -> Chart:
    lines = [
        Line(name=result.case.name, points=_points(result.losses), color=index, dash=dash_of_run(index))
        for index, result in enumerate(ran)
    ]
    return Chart(title="Loss", y_label="loss per trained token", lines=lines)


def _differences(ran: list[CaseResult], tolerance: float) -> Chart:
    """Plot powers of ten: differences of 1e-7 and 1e-3 both matter. Steps with bitwise equal losses are omitted."""
    lines = [
        Line(
            name=result.case.name,
            points=_points([_power(value) for value in result.difference.per_step]),
            color=index + 1,
            dash=dash_of_run(index + 1),
        )
        for index, result in enumerate(ran)
        if result.difference is not None
    ]
    asked = f"The tolerance is {math.log10(tolerance):.1f}." if tolerance else "The tolerance is 0: equal losses."
    return Chart(
        title="Difference from the reference",
        y_label="relative, as a power of ten",
        lines=lines,
        note=asked,
    )


def _power(value: float) -> float | None:
    return math.log10(value) if value > 0 and math.isfinite(value) else None


def _points(values: list[float] | list[float | None]) -> list[tuple[float, float | None]]:
    return [(float(step), value) for step, value in enumerate(values, 1)]
