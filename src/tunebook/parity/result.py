"""Results of a parity: the differences of the losses, the table for the terminal, the page, the JSON, the exit code.

The order of sums may change losses. In fp32 that affects the seventh digit and grows with the steps. In bf16 it affects
the third digit of each product, and a strategy may round at other places than a single GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from tunebook.errors import DifferenceError, TunebookError
from tunebook.files import atomic_write_text
from tunebook.parity.cases import Case
from tunebook.record.losses import Difference, compare_losses
from tunebook.record.manifest import manifest_or_empty
from tunebook.record.metrics import is_training_line, read_metrics
from tunebook.record.page.charts import Chart, Line
from tunebook.record.page.curves import dash_of_run
from tunebook.record.report import render_page


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One configuration's results and their difference from the reference."""

    case: Case
    run_folder: Path
    exit_code: int | None  # None: not started
    losses: list[float | None]
    difference: Difference | None  # None: not started, or the run failed
    tokens_per_second_per_gpu: float | None
    memory_gib: float | None  # the highest of all ranks
    found: dict[str, Any] | None  # what the model was wrapped in

    @property
    def has_failed(self) -> bool:
        """True if it was started and has nothing to compare: it failed, or it has no step."""
        return self.exit_code is not None and (self.exit_code != 0 or not self.losses)

    def is_within(self, tolerance: float) -> bool:
        """True if its difference from the reference is allowed."""
        return self.difference is not None and self.difference.largest <= tolerance


def read_case(case: Case, run_folder: Path, exit_code: int | None, reference: CaseResult | None) -> CaseResult:
    """The results of one run, compared with the reference, or with itself if it is the reference."""
    lines = [line for line in read_metrics(run_folder) if is_training_line(line)]
    losses = [line["loss"] for line in lines]
    speeds = [speed for line in lines[len(lines) // 4 :] if (speed := line["tokens_per_second_per_gpu"]) is not None]
    is_compared = exit_code == 0 and bool(losses)
    return CaseResult(
        case=case,
        run_folder=run_folder,
        exit_code=exit_code,
        losses=losses,
        difference=compare_losses(losses, reference.losses if reference else losses) if is_compared else None,
        tokens_per_second_per_gpu=median(speeds) if speeds else None,
        memory_gib=max(lines[-1]["memory_gib"]) if lines else None,
        found=manifest_or_empty(run_folder).get("parallelism_found"),
    )


def exit_code_of(results: list[CaseResult], tolerance: float) -> int:
    """The code of the first run that failed; otherwise 0 if all losses agree, and 5 if not."""
    ran = [result for result in results if result.case.refused is None]
    failed = next((result.exit_code or TunebookError.exit_code for result in ran if result.has_failed), None)
    if failed is not None:
        return failed
    return 0 if all(result.is_within(tolerance) for result in ran) else DifferenceError.exit_code


def parity_table(results: list[CaseResult], tolerance: float) -> Table:
    """One row per configuration, in the order they ran."""
    title = f"Loss per step, compared with {results[0].case.name}; tolerance {tolerance:g}, relative"
    table = Table(title=Text(title, style="table.title"))
    for heading in ("configuration", "wrapped in", "steps", "first loss", "last loss", "largest difference", "verdict"):
        table.add_column(heading, justify="left" if heading in ("configuration", "wrapped in", "verdict") else "right")
    table.add_column("tokens/s/GPU", justify="right")
    table.add_column("GiB", justify="right")
    for index, result in enumerate(results):
        table.add_row(*map(Text, _row(result, tolerance, is_reference=index == 0)))  # not markup: lists have brackets
    return table


def _row(result: CaseResult, tolerance: float, *, is_reference: bool) -> list[str]:
    if result.case.refused is not None:
        return [result.case.name, "-", "-", "-", "-", "-", f"not possible: {result.case.refused}", "-", "-"]
    losses = [f"{loss:.5f}" if loss is not None else "not finite" for loss in result.losses] or ["-"]
    difference = result.difference
    shown = "-" if difference is None else f"{difference.largest:.1e} at {difference.at_step}"
    return [
        result.case.name,
        str((result.found or {}).get("strategy", "-")),
        str(len(result.losses)),
        losses[0],
        losses[-1],
        "reference" if is_reference else shown,
        verdict(result, tolerance, is_reference=is_reference),
        "-" if result.tokens_per_second_per_gpu is None else f"{result.tokens_per_second_per_gpu:,.0f}",
        "-" if result.memory_gib is None else f"{result.memory_gib:.2f}",
    ]


def verdict(result: CaseResult, tolerance: float, *, is_reference: bool) -> str:
    """The verdict in one or two words."""
    if result.case.refused is not None:
        return "not possible"
    if result.exit_code is None:
        return "not started"
    if result.has_failed:
        return f"failed ({result.exit_code or 'no steps'})"
    return "" if is_reference else "the same" if result.is_within(tolerance) else "DIFFERENT"


def to_json(results: list[CaseResult], tolerance: float) -> dict[str, Any]:
    """The content of parity.json. An infinite difference, as of runs of different length, is null."""
    return {
        "reference": results[0].case.name,
        "tolerance": tolerance,
        "cases": [
            {
                "name": result.case.name,
                "overrides": list(result.case.overrides),
                "verdict": verdict(result, tolerance, is_reference=index == 0),
                "refused": result.case.refused,
                "exit_code": result.exit_code,
                "run_folder": str(result.run_folder),
                "parallelism_found": result.found,
                "losses": result.losses,
                "largest_difference": _finite(result.difference.largest) if result.difference else None,
                "at_step": result.difference.at_step if result.difference else None,
                "difference_per_step": [_finite(value) for value in result.difference.per_step]
                if result.difference
                else [],
                "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
                "memory_gib": result.memory_gib,
            }
            for index, result in enumerate(results)
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
