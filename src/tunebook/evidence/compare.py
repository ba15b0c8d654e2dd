"""Compare a run with recorded evidence: which numbers are judged, which are only displayed, and the verdicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from tunebook.config.choices import Weights
from tunebook.config.identity import changed_settings, flat_differences
from tunebook.errors import first_few
from tunebook.evidence.gather import RunFacts
from tunebook.evidence.run_checks import steps_text
from tunebook.evidence.schema import Hardware, Inputs, Repeat, Results, Software, Target, Tolerance
from tunebook.evidence.tolerances import LOSS, MEMORY, SPEED, at_steps, loss_difference, relative, score_key, why_slowed

# How a step is split over GPUs and memory, and which kernels compute it. Tests prove that the loss does not depend on
# them.
SPLITS = (
    "training.micro_batch_size", "packing.row_length", "activation", "parallelism", "attention.implementation",
    "model.compile_layers", "model.one_pass_head", "evaluation.batch_size",
)  # fmt: skip
_NUM_NAMED = 4  # differing keys that a message lists

# Path keys by the hash of their content: if both hashes are known, they are compared instead of the paths. A model's
# hash is that of its config.json, which is sufficient for random weights only. Other weights have a fingerprint.
_PLACES = {
    "data_sha256": re.compile(r"dataset\.(path|validation_path|parts\.[^.]+\.path)"),
    "tokenizer_sha256": re.compile(r"model\.tokenizer"),
    "chat_template_sha256": re.compile(r"model\.chat_template"),
    "model_sha256": re.compile(r"model\.path"),
}


# Stated sizes of a data set, for plans before it is prepared.
_PLANNED_BY = ("dataset.mean_tokens", "dataset.num_documents")


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
    """One number of the evidence and of the run. The difference is relative or absolute, like its tolerance.

    A row without numbers is a remark.
    """

    name: str
    expected: float | None = None
    found: float | None = None
    difference: float | None = None
    tolerance: float | None = None
    verdict: Verdict
    why: str  # how the tolerance was computed, or why the number is not judged

    def to_json(self) -> dict[str, Any]:
        """As `verify --json` prints it. An infinite difference is null."""
        is_finite = self.difference is not None and self.difference < float("inf")
        return asdict(self) | {
            "difference": self.difference if is_finite else None,
            "verdict": self.verdict.value,
        }


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The reference of a comparison: recorded evidence, or another run."""

    name: str
    what: str  # the recipe, weights, data, layers and steps
    results: Results
    hardware: Hardware
    inputs: Inputs
    software: Software
    tolerances: dict[str, Tolerance]
    elsewhere: dict[str, Tolerance] | None = None  # on another processor; None if the same tolerances hold there
    target: Target | None = None
    repeats: Sequence[Repeat] = ()  # empty for another run
    num_resumed: int = 0  # number of times the other run resumed


def named_differences(differing: list[tuple[str, Any, Any]]) -> str:
    """The first few differing keys with both values, and the number of the others."""
    return first_few([f"{key} is {two}, recorded with {one}" for key, one, two in differing], _NUM_NAMED, "; ")


def config_differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The differences of two comparable configurations, except how a step is split and what only a plan reads."""
    return [found for found in changed_settings(one, other) if not is_split(found[0]) and found[0] not in _PLANNED_BY]


def input_differences(one: Inputs, other: Inputs) -> list[tuple[str, Any, Any]]:
    """Return the differences of two runs' configurations and inputs.

    Data is equal if its tokens and labels are; `remarks` has different preparation. Weights from a folder
    are compared only if both fingerprints are known: older evidence has none.
    """
    rest = {"config", "data_fingerprint"}
    if None in (one.weights_fingerprint, other.weights_fingerprint):
        rest |= {"weights_fingerprint"}
    first, second = one.model_dump(mode="json", exclude=rest), other.model_dump(mode="json", exclude=rest)
    settings = config_differences(one.config, other.config)
    return [
        *(found for found in settings if not _is_compared_by_hash(found[0], one, other)),
        *flat_differences(first, second),
    ]


def _is_compared_by_hash(key: str, one: Inputs, other: Inputs) -> bool:
    """True for a path whose content's hash is known in both runs."""
    for name, places in _PLACES.items():
        if places.fullmatch(key) and None not in (getattr(one, name), getattr(other, name)):
            are_weights_known = None not in (one.weights_fingerprint, other.weights_fingerprint)
            is_random = one.config["model"]["weights"] == Weights.random.name
            return name != "model_sha256" or is_random or are_weights_known
    return False


def split_differences(one: Inputs, other: Inputs) -> list[tuple[str, Any, Any]]:
    """The differences in how a step was split and computed. They change speed and memory but not the loss."""
    differing = changed_settings(one.config, other.config)
    return [found for found in differing if is_split(found[0]) and not found[0].startswith("evaluation")]


def is_split(key: str) -> bool:
    """Return whether a key sets how a step is split or computed, rather than what is learned."""
    return any(key == split or key.startswith(f"{split}.") for split in SPLITS)


def same_machine(one: Hardware, other: Hardware) -> str | None:
    """Return why speed and memory cannot be judged against each other; None if they can."""
    if one.gpu is None and other.gpu is None:
        return other_processor(one, other)
    if one.gpu is None or other.gpu is None:
        return "a CPU and a GPU: speed and memory cannot be compared"
    return _first_difference(
        ("GPU", one.gpu, other.gpu),
        ("number of GPUs", one.gpus, other.gpus),
        ("number of nodes", one.nodes, other.nodes),
    )


def other_processor(one: Hardware, other: Hardware) -> str | None:
    """Return what differs from the recorded CPU and changes speed and the order of sums; None if nothing does."""
    if one.processor is None or other.processor is None:
        whose = "the evidence" if one.processor is None else "the run"
        return f"a CPU: {whose} does not record its processor"
    return _first_difference(
        ("processor", one.processor.name, other.processor.name),
        ("instruction set", one.processor.instructions, other.processor.instructions),
        ("number of threads", one.processor.threads, other.processor.threads),
        ("number of cores", one.cpus, other.cpus),
        ("number of ranks", one.gpus, other.gpus),
    )


def _first_difference(*pairs: tuple[str, str | int, str | int]) -> str | None:
    return next((f"another {name}: {two}, recorded on {first}" for name, first, two in pairs if first != two), None)


def _elsewhere(claim: Claim, packages: dict[str, str], why_shown: str | None) -> str | None:
    """Return why a run cannot have the bits of the recorded one; None if it can."""
    recorded = claim.software.packages
    differing = sorted(name for name in recorded | packages if recorded.get(name) != packages.get(name))
    return why_shown or (f"other packages: {', '.join(differing)}" if differing else None)


def compare(claim: Claim, run: RunFacts) -> list[Row]:
    """Compare every number of the claim with those of a run, whose inputs are the same."""
    why_shown = same_machine(claim.hardware, run.hardware)
    if why_shown is None and split_differences(claim.inputs, run.inputs):
        why_shown = "the step is split differently"
    expected, results, limits = claim.results, run.results, claim.tolerances
    of_results = limits
    if claim.elsewhere is not None and (elsewhere := _elsewhere(claim, run.software.packages, why_shown)) is not None:
        of_results = _with_reason(claim.elsewhere, elsewhere)
    is_on_cpu = run.hardware.gpu is None
    why_speed = _why_no_speed(claim, results) if is_on_cpu else None
    why_memory = "a CPU's memory is that of the whole process, with its libraries" if is_on_cpu else None
    speeds = (expected.tokens_per_second_per_gpu, results.tokens_per_second_per_gpu)
    rows = [
        _loss_row(claim, of_results[LOSS], results, run.num_resumed),
        _row("tokens/s/GPU", *speeds, limits.get(SPEED), why_shown or why_speed),
        _row("memory GiB", expected.memory_gib, results.memory_gib, limits.get(MEMORY), why_shown or why_memory),
        # A property of the plan, which has its own bounds.
        Row(
            name="plan error", expected=_plan_error(expected), found=_plan_error(results), verdict=Verdict.shown,
            why="of the estimated memory; the estimate may have been improved since",
        ),
    ]  # fmt: skip
    for task, score in expected.scores.items():
        found = results.scores.get(task)
        rows.append(_row(task, score.value, found.value if found else None, of_results.get(score_key(task)), None))
    return [row for row in rows if row.expected is not None or row.found is not None]


def remarks(claim: Claim, run: RunFacts) -> list[Row]:
    """Return remarks on what is not judged: data that was prepared differently, and packages unlike the lock's."""
    return [*_preparation_remark(claim.inputs, run.inputs), *_packages_remark(claim.software, run.software)]


def _preparation_remark(one: Inputs, other: Inputs) -> list[Row]:
    """The fingerprint changes with code and libraries even if no token does. Older records lack it."""
    then, now = one.data_fingerprint, other.data_fingerprint
    if then is None or now is None or then == now:
        return []
    is_same = one.data_sha256 is not None and one.data_sha256 == other.data_sha256
    result = "tokens and labels are the same" if is_same else "whether the tokens are the same is not recorded"
    why = f"prepared from other files or by other code or libraries: fingerprint {now[:12]}..., recorded with "
    return [Row(name="prepared data", verdict=Verdict.shown, why=f"{why}{then[:12]}...; {result}")]


def _packages_remark(recorded: Software, found: Software) -> list[Row]:
    then, now = recorded.deviation(), found.deviation()
    if then is None and now is None:
        return []
    why = f"recorded: {then or 'as locked'}; this run: {now or 'as locked'}"
    return [Row(name="packages", verdict=Verdict.shown, why=why)]


def _why_no_speed(claim: Claim, results: Results) -> str | None:
    """Return why the speed of a run on the same CPU cannot be judged; None if it can."""
    if not claim.repeats:
        return "only repeated runs show the speed of a CPU"
    if (recorded := why_slowed(claim.results)) is not None:
        return f"the recorded run {recorded}"
    return None if (found := why_slowed(results)) is None else f"this run {found}"


def _with_reason(tolerances: dict[str, Tolerance], why: str) -> dict[str, Tolerance]:
    """Add to each tolerance why it is the one that applies."""
    return {key: one.model_copy(update={"how": f"{why}; {one.how}"}) for key, one in tolerances.items()}


def _loss_row(claim: Claim, allowed: Tolerance, results: Results, num_resumed: int) -> Row:
    """Compare the loss at the steps that both logged.

    A kill loses at most one logged step: the one that was trained partly before and partly after the checkpoint. Any
    other missing step is a difference.
    """
    expected = claim.results
    last = {"expected": expected.losses[-1], "found": results.losses[-1], "tolerance": allowed.value}
    recorded, logged = set(expected.steps), set(results.steps)
    both, lost = recorded & logged, sorted(recorded ^ logged)
    if not both or len(recorded - logged) > num_resumed or len(logged - recorded) > claim.num_resumed:
        why = f"recorded at steps {steps_text(expected.steps)}, this run logged {steps_text(results.steps)}"
        return Row(name="loss", **last, verdict=Verdict.different, why=why)
    why = allowed.how
    if lost:
        expected, results = at_steps(expected, both), at_steps(results, both)
        why += f"; {len(lost)} of {len(recorded | logged)} left out ({steps_text(lost)}): killed and resumed around it"
    difference = loss_difference(results, expected)
    verdict = Verdict.same if difference <= allowed.value else Verdict.different
    return Row(name="loss", **last, difference=difference, verdict=verdict, why=why)


def _row(
    name: str, expected: float | None, found: float | None, tolerance: Tolerance | None, why_shown: str | None
) -> Row:
    if expected is None or found is None or tolerance is None:
        if found is None:
            verdict = Verdict.different if why_shown is None else Verdict.shown
            return Row(name=name, expected=expected, verdict=verdict, why="the run has none")
        why = "none was recorded" if expected is None else why_shown or "the recorded runs differ too much to judge by"
        return Row(name=name, expected=expected, found=found, verdict=Verdict.shown, why=why)
    difference = relative(found, expected) if tolerance.kind == "relative" else abs(found - expected)
    verdict = Verdict.same if difference <= tolerance.value else Verdict.different
    return Row(
        name=name, expected=expected, found=found, difference=difference, tolerance=tolerance.value,
        verdict=verdict if why_shown is None else Verdict.shown, why=why_shown or tolerance.how,
    )  # fmt: skip


def _plan_error(results: Results) -> float | None:
    planned, measured = results.planned_memory_gib, results.memory_gib
    return None if planned is None or not measured else planned / measured - 1
