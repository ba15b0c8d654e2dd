"""`tunebook verify RUN`: find the evidence to compare a run with, and compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tunebook.errors import DifferenceError, RequestError
from tunebook.evidence.compare import (
    Claim,
    Row,
    compare,
    input_differences,
    named_differences,
    preparation_row,
    split_differences,
)
from tunebook.evidence.gather import config_of, gather_description, gather_hardware, gather_inputs, gather_results
from tunebook.evidence.run_checks import num_resumed
from tunebook.evidence.schema import Hardware, Inputs, Results, RunDescription, Software
from tunebook.evidence.software import gather_software, packages_row
from tunebook.evidence.target import target_row
from tunebook.evidence.tolerances import SPEED, compute_tolerances
from tunebook.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A run compared with a claim."""

    name: str  # of the claim: a file of evidence, or a run
    what: str  # description of the claim: the recipe, weights, data, layers and steps
    claim: Claim
    results: Results
    hardware: Hardware
    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """0, or 5 if a judged number exceeds its tolerance."""
        is_different = any(row.verdict.is_difference for row in self.rows)
        return DifferenceError.exit_code if is_different else 0

    def to_json(self) -> dict[str, Any]:
        """The output of `verify --json`."""
        return {
            "claim": self.name,
            "what": self.what,
            "agrees": self.exit_code == 0,
            "rows": [row.to_json() for row in self.rows],
        }

    def table(self) -> Table:
        """Format the verification for a terminal."""
        title = Text(f"{self.name}: {self.what}")  # names and overrides may contain brackets
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in ("", "recorded", "this run", "difference", "tolerance", "verdict", "why"):
            is_number = heading in ("recorded", "this run", "difference", "tolerance")
            table.add_column(heading, justify="right" if is_number else "left")
        for row in self.rows:
            style = "red" if row.verdict.is_difference else None
            numbers = (_number(row.expected), _number(row.found), _small(row.difference), _small(row.tolerance))
            table.add_row(Text(row.name), *numbers, row.verdict.value, Text(row.why), style=style)
        return table


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A reference for a run: evidence, or an earlier run."""

    name: str
    what: str
    claim: Claim
    inputs: Inputs
    software: Software


def recorded_run(original: RunRecord, recipes_dirs: list[Path]) -> Recorded:
    """Return a finished run as a reference for others; the tolerances are the floors."""
    config, results = config_of(original.folder), gather_results(original)
    hardware, tolerances = gather_hardware(original, config), compute_tolerances([results], config)
    if hardware.gpu is None:  # one run does not show how much other work slows a CPU
        tolerances.pop(SPEED, None)
    return Recorded(
        name=original.name,
        what=describe(gather_description(original, config, recipes_dirs)),
        claim=Claim(results=results, hardware=hardware, tolerances=tolerances, num_resumed=num_resumed(original)),
        inputs=gather_inputs(original, config),
        software=gather_software(original.manifest or {}),
    )


def compare_run(recorded: Recorded, record: RunRecord) -> Verification:
    """Compare a finished run with evidence or another run. Raises: RequestError if their inputs differ."""
    config = config_of(record.folder)
    inputs, hardware, results = gather_inputs(record, config), gather_hardware(record, config), gather_results(record)
    if differing := input_differences(recorded.inputs, inputs):
        raise RequestError(
            f"{record.folder} is not a repetition of {recorded.name}: {named_differences(differing)}",
            problem_id="evidence-of-other-config",
        )
    is_split_equally = not split_differences(recorded.inputs, inputs)
    claim, software = recorded.claim, gather_software(record.manifest or {})
    rows = compare(
        claim,
        results,
        hardware,
        is_split_equally=is_split_equally,
        num_resumed=num_resumed(record),
        packages=software.packages,
    )
    if claim.target is not None:
        rows.append(target_row(claim.target, record, claim.repeats))
    remarks = (preparation_row(recorded.inputs, inputs), packages_row(recorded.software, software))
    return Verification(
        name=recorded.name,
        what=recorded.what,
        claim=claim,
        results=results,
        hardware=hardware,
        rows=[*rows, *(row for row in remarks if row is not None)],
    )


def describe(ran: RunDescription) -> str:
    """Describe the run in one line."""
    words = f"; {' '.join(ran.overrides)}" if ran.overrides else ""
    return f"{ran.recipe}, {ran.weights} weights, {ran.data} data, layers: {ran.layers}, {ran.steps} steps{words}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
