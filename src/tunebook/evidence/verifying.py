"""`tunebook verify RUN`: find the evidence that a run can be compared with, compare, and show what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tunebook.config.schema import RunConfig
from tunebook.errors import DifferenceError, RequestError
from tunebook.evidence.compare import Claim, Row, Verdict, compare, flat, input_differences, same_machine
from tunebook.evidence.files import evidence_files, read_evidence
from tunebook.evidence.gather import config_of, gather_hardware, gather_inputs, gather_ran, gather_results
from tunebook.evidence.schema import Evidence, Hardware, Inputs, Ran, Results
from tunebook.evidence.tolerances import work_out
from tunebook.record.run_record import RunRecord

_NUM_NAMED = 4  # differing keys that a message names


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A run held against a claim."""

    name: str  # of the claim: a file of evidence, or a run
    what: str  # was claimed: the recipe, weights, data, layers and steps
    claim: Claim
    results: Results
    hardware: Hardware
    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """0, or 5 where a judged number is too far off."""
        is_different = any(row.verdict is Verdict.different for row in self.rows)
        return DifferenceError.exit_code if is_different else 0

    def to_json(self) -> dict[str, Any]:
        """What `verify --json` prints."""
        return {"claim": self.name, "agrees": self.exit_code == 0, "rows": [row.to_json() for row in self.rows]}

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=f"{self.name}: {self.what}", title_justify="left", box=None, pad_edge=False)
        for heading in ("", "recorded", "this run", "difference", "tolerance", "verdict", "why"):
            is_number = heading in ("recorded", "this run", "difference", "tolerance")
            table.add_column(heading, justify="right" if is_number else "left")
        for row in self.rows:
            style = "red" if row.verdict is Verdict.different else None
            numbers = (_number(row.expected), _number(row.found), _small(row.difference), _small(row.tolerance))
            table.add_row(row.name, *numbers, row.verdict.value, row.why, style=style)
        return table


def verify(record: RunRecord, recipes_dirs: list[Path], against: Path | None = None) -> Verification:
    """Compare a finished run with the recipe's evidence, or with one file.

    Raises: RequestError where there is none for what was run, DataError for a file that is damaged.
    """
    config = config_of(record.folder)
    inputs, hardware = gather_inputs(record, config), gather_hardware(record, config)
    file, evidence = _choose(config, inputs, hardware, recipes_dirs, against)
    claim = Claim(results=evidence.results, hardware=evidence.hardware, tolerances=evidence.tolerances)
    what = f"recorded on {evidence.recorded}: {describe(evidence.ran)}"
    return _held_against(claim, file.name, what, record, is_split_alike=_splits(evidence.inputs) == _splits(inputs))


def verify_against_run(record: RunRecord, original: RunRecord) -> Verification:
    """Compare a finished run with another that was to be the same, by what equal runs may differ.

    Raises: RequestError where the two were asked for different things.
    """
    one, other = config_of(original.folder), config_of(record.folder)
    inputs, found = gather_inputs(original, one), gather_inputs(record, other)
    if differing := input_differences(inputs, found):
        raise RequestError(
            f"{record.folder} is no repetition of {original.folder}: {named_differences(differing)}",
            problem_id="evidence-of-other-config",
        )
    results = gather_results(original)
    claim = Claim(results=results, hardware=gather_hardware(original, one), tolerances=work_out([results], one))
    what = describe(gather_ran(original, one))
    return _held_against(claim, original.name, what, record, is_split_alike=_splits(inputs) == _splits(found))


def _held_against(claim: Claim, name: str, what: str, record: RunRecord, *, is_split_alike: bool) -> Verification:
    results, hardware = gather_results(record), gather_hardware(record, config_of(record.folder))
    rows = compare(claim, results, hardware, is_split_alike=is_split_alike)
    return Verification(name=name, what=what, claim=claim, results=results, hardware=hardware, rows=rows)


def describe(ran: Ran) -> str:
    """What was run, as one line."""
    words = f"; {' '.join(ran.overrides)}" if ran.overrides else ""
    return f"{ran.recipe}, {ran.weights} weights, {ran.data} data, layers: {ran.layers}, {ran.steps} steps{words}"


def named_differences(differing: list[tuple[str, Any, Any]]) -> str:
    """The first few keys that are not the same, with both values, and how many more."""
    named = [f"{key} is {two}, recorded with {one}" for key, one, two in differing[:_NUM_NAMED]]
    more = f", and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    return f"{'; '.join(named)}{more}"


def _choose(
    config: RunConfig, inputs: Inputs, hardware: Hardware, recipes_dirs: list[Path], against: Path | None
) -> tuple[Path, Evidence]:
    """The evidence of the same thing, rather on the same machine."""
    recipe = config.recipe or "custom"
    files = [against] if against is not None else evidence_files(recipe, recipes_dirs) if config.recipe else []
    if not files:
        raise RequestError(
            f"nothing is recorded for {recipe}; tunebook list names the recipes that have evidence, and "
            "tunebook verify RUN RUN --record --label NAME writes some",
            problem_id="no-evidence",
        )
    known = [(file, read_evidence(file)) for file in files]
    fitting = [(file, found) for file, found in known if not input_differences(found.inputs, inputs)]
    if not fitting:
        raise _of_other_things(recipe, known, inputs)
    return min(fitting, key=lambda one: (same_machine(one[1].hardware, hardware) is not None, one[0].name))


def _of_other_things(recipe: str, known: list[tuple[Path, Evidence]], inputs: Inputs) -> RequestError:
    """The error that names the evidence that comes nearest, and what is not the same."""
    file, nearest = min(known, key=lambda one: len(input_differences(one[1].inputs, inputs)))
    differing = input_differences(nearest.inputs, inputs)
    words = " ".join([nearest.ran.recipe, *nearest.ran.overrides])
    return RequestError(
        f"the evidence of {recipe} is of something else. Nearest is {file.name}: {named_differences(differing)}. To "
        f"check that claim: tunebook train {words}",
        problem_id="evidence-of-other-config",
    )


def _splits(inputs: Inputs) -> dict[str, Any]:
    return {key: value for key, value in flat(inputs.config) if not key.startswith("evaluation")}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
