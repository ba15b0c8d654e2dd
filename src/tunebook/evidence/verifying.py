"""`tunebook verify RUN`: find the evidence to compare a run with, and compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tunebook.errors import DifferenceError, RequestError
from tunebook.evidence.compare import Claim, Row, compare, input_differences, named_differences, remarks
from tunebook.evidence.gather import RunFacts
from tunebook.evidence.schema import RunDescription
from tunebook.evidence.target import target_row
from tunebook.evidence.tolerances import SPEED, compute_tolerances


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A run compared with a claim."""

    claim: Claim
    run: RunFacts
    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """0, or 5 if a judged number exceeds its tolerance."""
        is_different = any(row.verdict.is_difference for row in self.rows)
        return DifferenceError.exit_code if is_different else 0

    def to_json(self) -> dict[str, Any]:
        """The output of `verify --json`."""
        return {
            "claim": self.claim.name,
            "what": self.claim.what,
            "agrees": self.exit_code == 0,
            "rows": [row.to_json() for row in self.rows],
        }

    def table(self) -> Table:
        """Format the verification for a terminal."""
        title = Text(f"{self.claim.name}: {self.claim.what}")  # names and overrides may contain brackets
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in ("", "recorded", "this run", "difference", "tolerance", "verdict", "why"):
            is_number = heading in ("recorded", "this run", "difference", "tolerance")
            table.add_column(heading, justify="right" if is_number else "left")
        for row in self.rows:
            style = "red" if row.verdict.is_difference else None
            numbers = (_number(row.expected), _number(row.found), _small(row.difference), _small(row.tolerance))
            table.add_row(Text(row.name), *numbers, row.verdict.value, Text(row.why), style=style)
        return table


def claim_of_run(original: RunFacts, recipes_dirs: list[Path]) -> Claim:
    """Return a finished run as a reference for others; the tolerances are the floors."""
    tolerances = compute_tolerances([original.results], original.config)
    if original.hardware.gpu is None:  # one run does not show how much other work slows a CPU
        tolerances.pop(SPEED, None)
    return Claim(
        name=original.record.name,
        what=describe(original.description(recipes_dirs)),
        results=original.results,
        hardware=original.hardware,
        inputs=original.inputs,
        software=original.software,
        tolerances=tolerances,
        num_resumed=original.num_resumed,
    )


def compare_run(claim: Claim, run: RunFacts) -> Verification:
    """Compare a finished run with evidence or another run. Raises: RequestError if their inputs differ."""
    if differing := input_differences(claim.inputs, run.inputs):
        raise RequestError(
            f"{run.record.folder} is not a repetition of {claim.name}: {named_differences(differing)}",
            problem_id="evidence-of-other-config",
        )
    rows = compare(claim, run)
    if claim.target is not None:
        rows.append(target_row(claim.target, run.record, claim.repeats))
    return Verification(claim=claim, run=run, rows=[*rows, *remarks(claim, run)])


def describe(ran: RunDescription) -> str:
    """Describe the run in one line."""
    words = f"; {' '.join(ran.overrides)}" if ran.overrides else ""
    return f"{ran.recipe}, {ran.weights} weights, {ran.data} data, layers: {ran.layers}, {ran.steps} steps{words}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
