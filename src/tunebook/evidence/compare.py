"""A run against recorded evidence: what is judged, what is only shown because the hardware differs, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from tunebook.config.choices import Weights
from tunebook.config.identity import changed_settings, flat_differences
from tunebook.evidence.schema import Hardware, Inputs, Results, Tolerance
from tunebook.evidence.tolerances import LOSS, MEMORY, SPEED, at_steps, loss_difference, relative, score_key

# How a step is split over GPUs and memory, and by which kernels it is computed. The loss is the same whatever they are:
# tests and `tunebook parity` show it.
SPLITS = (
    "training.micro_batch_size", "packing.row_length", "activation", "parallelism", "attention.implementation",
    "model.compile_layers", "model.one_pass_head", "evaluation.batch_size",
)  # fmt: skip


_NUM_GROUPS = 4  # of steps that a reason names
_NUM_NAMED = 4  # differing keys that a message names

# Where something lies, by the hash of what lies there: two runs that know both hashes are held together by those.
# A model's hash is that of its config.json, which says everything of random weights alone; others have a fingerprint.
_PLACES = {
    "data_sha256": re.compile(r"dataset\.(path|validation_path|parts\.[^.]+\.path)"),
    "tokenizer_sha256": re.compile(r"model\.tokenizer"),
    "chat_template_sha256": re.compile(r"model\.chat_template"),
    "model_sha256": re.compile(r"model\.path"),
}


class Verdict(Enum):
    """What came of one number."""

    same = "within tolerance"
    different = "DIFFERENT"
    shown = "not judged"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of the evidence and of the run; the difference is relative or absolute as its tolerance is.

    Or something that is told in words alone, and has no numbers.
    """

    name: str
    expected: float | None
    found: float | None
    difference: float | None
    tolerance: float | None
    verdict: Verdict
    why: str  # how the tolerance was worked out, or why it is not judged

    def to_json(self) -> dict[str, Any]:
        """As `verify --json` prints it; a difference without a number is null."""
        is_number = self.difference is not None and self.difference < float("inf")
        return {
            "name": self.name,
            "expected": self.expected,
            "found": self.found,
            "difference": self.difference if is_number else None,
            "tolerance": self.tolerance,
            "verdict": self.verdict.value,
            "why": self.why,
        }


def named_differences(differing: list[tuple[str, Any, Any]]) -> str:
    """The first few keys that are not the same, with both values, and how many more."""
    named = [f"{key} is {two}, recorded with {one}" for key, one, two in differing[:_NUM_NAMED]]
    more = f", and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    return f"{'; '.join(named)}{more}"


def config_differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """What two comparable configurations do not have in common; how a step is split does not count."""
    return [found for found in changed_settings(one, other) if not is_split(found[0])]


def input_differences(one: Inputs, other: Inputs) -> list[tuple[str, Any, Any]]:
    """What is not the same in what two runs were asked and given.

    Data is the same where its tokens and labels are, whatever prepared them: `preparation_row` tells what did. Weights
    from a folder are compared where both are known: older evidence does not name them.
    """
    rest = {"config", "data_fingerprint"}
    if None in (one.weights_fingerprint, other.weights_fingerprint):
        rest |= {"weights_fingerprint"}
    first, second = one.model_dump(mode="json", exclude=rest), other.model_dump(mode="json", exclude=rest)
    of_config = [
        found for found in config_differences(one.config, other.config) if not _is_known_place(found[0], one, other)
    ]
    return [*of_config, *flat_differences(first, second)]


def _is_known_place(key: str, one: Inputs, other: Inputs) -> bool:
    """Whether a key only says where something lies whose content is known of both."""
    for name, places in _PLACES.items():
        if places.fullmatch(key) and None not in (getattr(one, name), getattr(other, name)):
            are_weights_known = None not in (one.weights_fingerprint, other.weights_fingerprint)
            is_random = one.config["model"]["weights"] == Weights.random.name
            return name != "model_sha256" or is_random or are_weights_known
    return False


def preparation_row(one: Inputs, other: Inputs) -> Row | None:
    """What is shown of data that was prepared otherwise; None where it was not, or where an older record cannot tell.

    A fingerprint changes with code and libraries that changed no token: it says where to look, and is no difference.
    """
    then, now = one.data_fingerprint, other.data_fingerprint
    if then is None or now is None or then == now:
        return None
    is_known = one.data_sha256 is not None and one.data_sha256 == other.data_sha256
    came_to = "tokens and labels are the same" if is_known else "nobody noted whether the tokens are the same"
    return Row(
        name="prepared data", expected=None, found=None, difference=None, tolerance=None, verdict=Verdict.shown,
        why=f"from other files or by other code or libraries: fingerprint {now[:12]}..., recorded with {then[:12]}...; "
        f"{came_to}",
    )  # fmt: skip


def split_differences(one: Inputs, other: Inputs) -> list[tuple[str, Any, Any]]:
    """What decides the speed and the memory, and no loss: how a step was split and computed in two runs."""
    differing = changed_settings(one.config, other.config)
    return [found for found in differing if is_split(found[0]) and not found[0].startswith("evaluation")]


def is_split(key: str) -> bool:
    """Whether a key of the configuration says how a step is divided or computed, and not what is learned."""
    return any(key == split or key.startswith(f"{split}.") for split in SPLITS)


def same_machine(one: Hardware, other: Hardware) -> str | None:
    """Why speed and memory cannot be judged against each other, or None where they can."""
    if one.gpu is None or other.gpu is None:
        return "a CPU: its speed and memory are its own"
    pairs: tuple[tuple[str, str | int, str | int], ...] = (
        ("GPU", one.gpu, other.gpu),
        ("number of GPUs", one.gpus, other.gpus),
        ("number of nodes", one.nodes, other.nodes),
    )
    for name, first, second in pairs:
        if first != second:
            return f"another {name}: {second}, recorded on {first}"
    return None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a run is held against: recorded evidence, or another run."""

    results: Results
    hardware: Hardware
    tolerances: dict[str, Tolerance]
    num_resumed: int = 0  # how often the run was taken up again, if it was one


def compare(
    claim: Claim, results: Results, hardware: Hardware, *, is_split_alike: bool, num_resumed: int = 0
) -> list[Row]:
    """Every number of the claim against those of a run that was taken up again `num_resumed` times."""
    why_shown = same_machine(claim.hardware, hardware)
    if why_shown is None and not is_split_alike:
        why_shown = "the step is split in another way"
    expected = claim.results
    rows = [_loss_row(claim, results, num_resumed)]
    speeds = (expected.tokens_per_second_per_gpu, results.tokens_per_second_per_gpu)
    rows.append(_row("tokens/s/GPU", *speeds, claim.tolerances.get(SPEED), why_shown))
    rows.append(_row("memory GiB", expected.memory_gib, results.memory_gib, claim.tolerances.get(MEMORY), why_shown))
    rows.append(_plan_error(expected, results))
    for task, score in expected.scores.items():
        found = results.scores.get(task)
        rows.append(
            _row(task, score.value, found.value if found else None, claim.tolerances.get(score_key(task)), None)
        )
    return [row for row in rows if row.expected is not None or row.found is not None]


def _loss_row(claim: Claim, results: Results, num_resumed: int) -> Row:
    """The loss at the steps that both logged, where the others were lost as a run was killed and taken up again.

    That loses one logged step at most: the one whose steps were trained before and after the checkpoint.
    """
    expected, loss = claim.results, claim.tolerances[LOSS]
    recorded, logged = set(expected.steps), set(results.steps)
    both, lost = recorded & logged, sorted(recorded ^ logged)
    is_comparable = both and len(recorded - logged) <= num_resumed and len(logged - recorded) <= claim.num_resumed
    if not is_comparable:
        return Row(
            name="loss", expected=expected.losses[-1], found=results.losses[-1], difference=None, tolerance=loss.value,
            verdict=Verdict.different,
            why=f"recorded at steps {told_steps(expected.steps)}, this run logged {told_steps(results.steps)}",
        )  # fmt: skip
    if lost:
        expected, results = at_steps(expected, both), at_steps(results, both)
    difference = loss_difference(results, expected)
    left_out = f"; {len(lost)} of {len(recorded | logged)} left out ({told_steps(lost)}): killed and resumed around it"
    return Row(
        name="loss", expected=expected.losses[-1], found=results.losses[-1], difference=difference,
        tolerance=loss.value, verdict=Verdict.same if difference <= loss.value else Verdict.different,
        why=loss.how + (left_out if lost else ""),
    )  # fmt: skip


def told_steps(steps: Sequence[int]) -> str:
    """Logged steps in few words: `5-8`, or `10-40 and 60-90, every 10`."""
    apart = min((two - one for one, two in pairwise(steps)), default=1)
    groups: list[list[int]] = []
    for step in steps:
        if groups and step - groups[-1][-1] == apart:
            groups[-1].append(step)
        else:
            groups.append([step])
    told = [f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups]
    if len(told) > _NUM_GROUPS:
        told = [*told[: _NUM_GROUPS - 1], f"{len(told) - _NUM_GROUPS + 1} more"]
    named = " and ".join([", ".join(told[:-1]), told[-1]]) if len(told) > 1 else "".join(told)
    return f"{named}, every {apart}" if apart > 1 and len(groups) < len(steps) else named


def _row(
    name: str, expected: float | None, found: float | None, tolerance: Tolerance | None, why_shown: str | None
) -> Row:
    if expected is None or found is None or tolerance is None:
        lacks = "the run has none" if found is None else "none was recorded"
        if expected is not None and found is not None:
            lacks = "the recorded runs differ too much to judge by"
        is_missing = found is None and why_shown is None
        return Row(
            name=name, expected=expected, found=found, difference=None, tolerance=None, why=lacks,
            verdict=Verdict.different if is_missing else Verdict.shown,
        )  # fmt: skip
    difference = relative(found, expected) if tolerance.kind == "relative" else abs(found - expected)
    if why_shown is not None:
        verdict, why = Verdict.shown, why_shown
    else:
        verdict = Verdict.same if difference <= tolerance.value else Verdict.different
        why = tolerance.how
    return Row(
        name=name, expected=expected, found=found, difference=difference, tolerance=tolerance.value, verdict=verdict,
        why=why,
    )  # fmt: skip


def _plan_error(expected: Results, found: Results) -> Row:
    """How far the plan's memory was off, then and now: a property of the plan, which is judged by its own bounds."""

    def error(results: Results) -> float | None:
        planned, measured = results.planned_memory_gib, results.memory_gib
        return None if planned is None or not measured else planned / measured - 1

    return Row(
        name="plan error", expected=error(expected), found=error(found), difference=None, tolerance=None,
        verdict=Verdict.shown, why="of the estimated memory; the estimate may have been improved since",
    )  # fmt: skip
