"""The comparison of two runs, for `tunebook verify`, `reproduce` and `diff`: settings, numbers and their tolerances."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.choices import PeftMethod
from tunebook.config.identity import changed_settings, flat_differences
from tunebook.errors import DifferenceError, RequestError, first_few
from tunebook.evidence.gather import RunFacts, training_overrides
from tunebook.evidence.schema import Evidence, Hardware, Inputs, Repeat, Score, Target, Tolerance
from tunebook.evidence.target import describe_target, progress_of, reached_text, recorded_text
from tunebook.evidence.tolerances import (
    FIRST_LOSS,
    LOSS,
    MEMORY,
    SPEED,
    compute_tolerances,
    loss_differences,
    relative,
    score_key,
    split_windows,
)
from tunebook.record.run_folder import run_name
from tunebook.record.run_record import RunRecord
from tunebook.terminal import print_text

Difference = tuple[str, Any, Any]  # the key, the value of the first (recorded) and that of the other run

# How a step is split over GPUs and memory, and which kernels compute it. Tests prove that the loss does not depend on
# them, but for dropout: another split drops other inputs.
_SPLITS = (
    "training.micro_batch_size", "packing.row_length", "activation", "parallelism", "attention.implementation",
    "model.compile_layers", "model.one_pass_head", "evaluation.batch_size",
)  # fmt: skip
_PLANNED_BY = ("dataset.mean_tokens", "dataset.num_documents")  # stated sizes, which only a plan reads
# Paths whose content is compared instead, if its hash is known of both runs.
_PLACES = {
    "data_sha256": re.compile(r"dataset\.(path|validation_path|parts\.[^.]+\.path)"),
    "tokenizer_sha256": re.compile(r"model\.tokenizer"),
    "chat_template_sha256": re.compile(r"model\.chat_template"),
    "weights_fingerprint": re.compile(r"model\.path"),
}
_NUM_NAMED = 4  # differing keys that a message lists


class Verdict(Enum):
    """The result for one number."""

    same = "within tolerance"
    different = "DIFFERENT"
    shown = "not judged"
    reached = "reached"  # a target
    missed = "MISSED"

    @property
    def is_difference(self) -> bool:
        """Whether the run does not agree with the evidence."""
        return self in (Verdict.different, Verdict.missed)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of both runs. The difference is relative or absolute, like its tolerance."""

    name: str
    expected: float | None = None
    measured: float | None = None
    difference: float | None = None
    tolerance: float | None = None
    verdict: Verdict
    reason: str  # how the tolerance was computed, or what differs, so that the number is not judged


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The reference of a comparison: recorded evidence, or another run."""

    name: str
    description: str  # the recipe, weights, data, layers and steps
    recorded: Evidence | RunFacts
    tolerances: dict[str, Tolerance]
    target: Target | None = None
    repeats: Sequence[Repeat] = ()  # empty for another run
    num_resumed: int = 0  # number of times the other run resumed


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run compared with a claim."""

    claim: Claim
    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """0, or 5 if a judged number exceeds its tolerance."""
        is_different = any(row.verdict.is_difference for row in self.rows)
        return DifferenceError.exit_code if is_different else 0

    def to_json(self) -> dict[str, Any]:
        """The output of `verify --json`."""
        rows = [asdict(row) | {"verdict": row.verdict.value} for row in self.rows]
        content = {"claim": self.claim.name, "description": self.claim.description}
        return content | {"agrees": self.exit_code == 0, "rows": rows}

    def print(self, console: Console) -> int:
        """Print the table and the verdict; returns the exit code."""
        self.print_rows(console)
        verdict = "agrees with" if self.exit_code == 0 else "DIFFERS from"
        print_text(f"the run {verdict} {self.claim.name}", console)
        return self.exit_code

    def print_rows(self, console: Console, names: tuple[str, str] = ("recorded", "this run")) -> None:
        """Print the numbers under names of the two sides, and below them the reasons, which no narrow column holds."""
        console.print(Text(f"{self.claim.name}: {self.claim.description}"))  # overrides may contain brackets
        table = Table(box=None, pad_edge=False)
        for heading in ("", *names, "difference", "tolerance", "verdict"):
            is_number = heading in (*names, "difference", "tolerance")
            table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
        for row in self.rows:
            style = "red" if row.verdict.is_difference else None
            numbers = (_number(row.expected), _number(row.measured), _small(row.difference), _small(row.tolerance))
            table.add_row(Text(row.name), *numbers, row.verdict.value, style=style)
        console.print(table)
        for row in self.rows:
            console.print(Text(f"{row.name}: {row.reason}", style="red" if row.verdict.is_difference else ""))


def claim_of_evidence(file: Path, evidence: Evidence) -> Claim:
    """Recorded evidence as the reference of a comparison."""
    ran = evidence.ran
    training = f"{ran.recipe}, {ran.weights} weights, {ran.data} data, layers: {ran.layers}, {ran.steps} steps"
    return Claim(
        name=file.name,
        description=f"{evidence.kind}, recorded on {evidence.recorded}: {training}",
        recorded=evidence,
        tolerances=evidence.tolerances,
        target=evidence.target,
        repeats=evidence.repeats,
    )


def claim_of_run(run: RunFacts) -> Claim:
    """A run as the reference of a comparison; the tolerances are the floors."""
    return Claim(
        name=run.record.name,
        description=" ".join([run_name(run.config), *training_overrides(run.manifest)]),
        recorded=run,
        tolerances=compute_tolerances([run.results], run.config),
        num_resumed=run.num_resumed,
    )


def compare(claim: Claim, run: RunFacts) -> Comparison:
    """Compare every number of a claim with those of a run.

    Losses and scores are judged on any machine; speed and memory on the same GPUs with the same split of a step.
    """
    recorded, expected, measured, limits = claim.recorded, claim.recorded.results, run.results, claim.tolerances
    packages = flat_differences(recorded.software.packages, run.software.packages, "packages")
    differing = [
        *hardware_differences(recorded.hardware, run.hardware), *split_differences(recorded.inputs, run.inputs)
    ]  # fmt: skip
    caveat = named(differing[:1]) or ("on a CPU" if run.hardware.gpu is None else "")
    speeds = (expected.tokens_per_second_per_gpu, measured.tokens_per_second_per_gpu)
    validation_limit = limits[LOSS].model_copy(update={"how": "the largest tolerance of the loss"})
    rows = [
        _loss_row(claim, run, limits[LOSS], is_computed_alike=not differing),
        _row("validation loss", expected.validation_loss, measured.validation_loss, validation_limit),
        _row("tokens/s/GPU", *speeds, limits.get(SPEED), caveat),
        _row("memory GiB", expected.memory_gib, measured.memory_gib, limits.get(MEMORY), caveat),
    ]
    for task in expected.scores | measured.scores:
        first, other = expected.scores.get(task), measured.scores.get(task)
        rows.append(_score_row(task, first, other, limits.get(score_key(task))))
    if FIRST_LOSS in limits and run.results.steps[0] == 1:
        rows.insert(0, _row("first loss", expected.losses[0], measured.losses[0], limits[FIRST_LOSS]))
    rows = [row for row in rows if row.expected is not None or row.measured is not None]
    if contents := content_differences(recorded.inputs, run.inputs):
        rows.insert(0, Row(name="inputs", verdict=Verdict.different, reason=named(contents)))
    if claim.target is not None:
        rows.append(_target_row(claim.target, run.record, claim.repeats))
    if packages:
        rows.append(Row(name="packages", verdict=Verdict.shown, reason=named(packages)))
    return Comparison(claim=claim, rows=rows)


def _loss_row(claim: Claim, run: RunFacts, allowed: Tolerance, *, is_computed_alike: bool) -> Row:
    """Compare the losses at the steps that both logged. A run loses at most one logged step where it was killed."""
    expected, measured = (
        dict(zip(part.results.steps, part.results.losses, strict=True)) for part in (claim.recorded, run)
    )
    shared, lost = sorted(expected.keys() & measured.keys()), sorted(expected.keys() ^ measured.keys())
    last = {"expected": claim.recorded.results.losses[-1], "measured": run.results.losses[-1]}
    last["tolerance"] = allowed.value
    reason = f"steps that only one run logged: {first_few(list(map(str, lost)), 4)}; " if lost else ""
    if not shared or len(lost) > claim.num_resumed + run.num_resumed:
        return Row(name="loss", **last, verdict=Verdict.different, reason=reason.removesuffix("; "))
    first = next((step for step in shared if expected[step] != measured[step]), None)
    reason += "equal to the last bit; " if first is None else f"differs from step {first}; "
    found = loss_differences([measured[step] for step in shared], [expected[step] for step in shared])
    limits = allowed.windows if len(allowed.windows) == len(found) else [allowed.value] * len(found)
    worst = max(range(len(found)), key=lambda window: found[window] / limits[window])
    verdict = Verdict.same if found[worst] <= limits[worst] else Verdict.different
    if verdict is Verdict.different:
        steps = split_windows(shared)[worst]
        where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        reason += f"most in {where}; "
        peft = run.config.peft
        if peft.method is not PeftMethod.full and peft.dropout and not is_computed_alike:
            reason += f"peft.dropout={peft.dropout:g} drops other inputs if a step is split otherwise; "
    last["tolerance"] = limits[worst]
    return Row(name="loss", **last, difference=found[worst], verdict=verdict, reason=reason + allowed.how)


def _row(
    name: str, expected: float | None, measured: float | None, tolerance: Tolerance | None, caveat: str = ""
) -> Row:
    """Judge a number, unless there is a reason not to, or the recorded runs support no tolerance."""
    if expected is None:
        return Row(name=name, measured=measured, verdict=Verdict.shown, reason="only this run has it")
    if measured is None:
        verdict = Verdict.shown if caveat else Verdict.different
        return Row(name=name, expected=expected, verdict=verdict, reason="the run has none")
    is_relative = tolerance is None or tolerance.kind == "relative"
    difference = relative(measured, expected) if is_relative else abs(measured - expected)
    numbers = {"expected": expected, "measured": measured, "difference": difference}
    if caveat or tolerance is None:
        return Row(name=name, **numbers, verdict=Verdict.shown, reason=caveat or "the recorded runs differ too much")
    verdict = Verdict.same if difference <= tolerance.value else Verdict.different
    return Row(name=name, **numbers, tolerance=tolerance.value, verdict=verdict, reason=tolerance.how)


def _score_row(task: str, expected: Score | None, measured: Score | None, tolerance: Tolerance | None) -> Row:
    """Judge a score. One of other items, as of another file of conversations under the same name, is a difference."""
    first, other = (None if score is None else score.value for score in (expected, measured))
    row = _row(task, first, other, tolerance)
    if expected is None or measured is None:
        return row
    keys = {"metric", "num_items"} | ({"items_sha256"} if expected.items_sha256 is not None else set())
    recorded, present = (score.model_dump(include=keys) for score in (expected, measured))
    differing = flat_differences(recorded, present)
    return replace(row, tolerance=None, verdict=Verdict.different, reason=named(differing)) if differing else row


def _target_row(target: Target, record: RunRecord, repeats: Sequence[Repeat]) -> Row:
    """Judge a run by a target; `repeats` are the recorded runs, without steps if their target was another."""
    progress = progress_of(target, record)
    verdict, reason = Verdict.missed, "the best value is shown"
    if progress.steps is not None:
        verdict, reason = Verdict.reached, reached_text([progress.steps], [progress.seconds])
    elif progress.best is None:
        reason = "the run does not measure it in these steps" if target.max_steps else "the run does not measure it"
    if any(repeat.steps_to_target is not None for repeat in repeats):
        reason += f"; recorded: {recorded_text(repeats)}"
    name = f"target: {describe_target(target)}"
    return Row(name=name, expected=target.value, measured=progress.best, verdict=verdict, reason=reason)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def named(differing: list[Difference]) -> str:
    """The first few differing keys with both values, and the number of the others."""
    texts = [f"{key} is {value}, recorded with {recorded}" for key, recorded, value in differing]
    return first_few(texts, _NUM_NAMED, "; ")


def config_differences(recorded: dict[str, Any], present: dict[str, Any]) -> list[Difference]:
    """The differences of two comparable configurations, except how a step is split and what only a plan reads."""
    differing = changed_settings(recorded, present)
    return [difference for difference in differing if not difference[0].startswith((*_SPLITS, *_PLANNED_BY))]


def setting_differences(recorded: Inputs, present: Inputs) -> list[Difference]:
    """The differences of two runs' configurations. A path may differ if its content is the same."""
    same = [place for name, place in _PLACES.items() if getattr(recorded, name) == getattr(present, name) is not None]
    settings = config_differences(recorded.config, present.config)
    return [difference for difference in settings if not any(place.fullmatch(difference[0]) for place in same)]


def content_differences(recorded: Inputs, present: Inputs) -> list[Difference]:
    """The differences of two runs' data, model, tokenizer and chat template.

    Data is equal if its tokens and labels are, however it was prepared. Weights from a folder are compared only if both
    fingerprints are known: older evidence has none.
    """
    first, second = (inputs.model_dump(exclude={"config", "data_fingerprint"}) for inputs in (recorded, present))
    if None in (first["weights_fingerprint"], second["weights_fingerprint"]):
        del first["weights_fingerprint"], second["weights_fingerprint"]
    return flat_differences(first, second)


def require_same_settings(recorded: Inputs, present: Inputs, message: str) -> None:
    """Raises: RequestError with the message and the settings that differ, if some do."""
    if differing := setting_differences(recorded, present):
        raise RequestError(f"{message}: {named(differing)}", problem_id="evidence-of-other-config")


def split_differences(recorded: Inputs, present: Inputs) -> list[Difference]:
    """The differences in how a step was split and computed. They change speed and memory but not the loss."""
    differing = changed_settings(recorded.config, present.config)
    return [difference for difference in differing if difference[0].startswith(_SPLITS[:-1])]  # not the evaluation's


def hardware_differences(recorded: Hardware, present: Hardware) -> list[Difference]:
    """The differences that change speed and memory."""
    keys = {"gpu", "gpus", "nodes"}
    return flat_differences(recorded.model_dump(include=keys), present.model_dump(include=keys), "hardware")
