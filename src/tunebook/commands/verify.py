"""`tunebook verify`: compare a run with the evidence of its recipe, or record the evidence of repeated runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from tunebook.config.identity import flat_differences
from tunebook.errors import RequestError
from tunebook.evidence.card import update_card, update_overview
from tunebook.evidence.compare import (
    Claim,
    claim_of_evidence,
    compare,
    content_differences,
    hardware_differences,
    named,
    require_same_settings,
    setting_differences,
    split_differences,
)
from tunebook.evidence.gather import RunFacts, read_finished
from tunebook.evidence.schema import (
    FORMAT,
    Evidence,
    Repeat,
    Target,
    evidence_files,
    evidence_folder,
    read_evidence,
    write_evidence,
)
from tunebook.evidence.target import Progress, describe_target, parse_target, progress_of
from tunebook.evidence.tolerances import compute_tolerances
from tunebook.files import sha256_file
from tunebook.record.metrics import METRICS_FILE
from tunebook.record.run_folder import resolve_run
from tunebook.terminal import print_text

_LABEL = re.compile(r"[a-z0-9][a-z0-9_.]*")


def verify_command(
    runs: list[str],
    outputs: Path,
    recipes_dirs: list[Path],
    console: Console,
    *,
    record: bool = False,
    label: str | None = None,
    against: Path | None = None,
    target: str | None = None,
    as_json: bool = False,
) -> int:
    """Compare a run (returns 0, or 5 if it differs), or write the evidence of repeated runs.

    Raises: RequestError for a run that has not finished or has no evidence; DataError for a broken file.
    """
    if record != (label is not None) or (record and against is not None) or (not record and len(runs) != 1):
        raise RequestError(
            "type tunebook verify [RUN] [--against FILE] to compare one run, or tunebook verify RUN RUN --record "
            "--label NAME to record evidence of several (to compare two runs: tunebook diff RUN RUN)",
            problem_id="evidence-label",
        )
    typed = None if target is None else parse_target(target)
    runs_read = [read_finished(resolve_run(run, outputs)) for run in runs]
    if label is not None:
        return _record(runs_read, label, recipes_dirs, console, typed)
    claim = find_claim(runs_read[0], recipes_dirs, against)
    if typed is not None:
        claim = replace(claim, target=typed, repeats=())  # the recorded runs had another target
    comparison = compare(claim, runs_read[0])
    if as_json:
        print(json.dumps(comparison.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return comparison.exit_code
    return comparison.print(console)


def find_claim(run: RunFacts, recipes_dirs: list[Path], against: Path | None) -> Claim:
    """The evidence of the same run, preferably of the same machine and then of a step that is split alike.

    Raises: RequestError if there is none, with what the nearest is of.
    """
    files = [against] if against is not None else evidence_files(_recipe_of(run), recipes_dirs)
    if not files:
        raise RequestError(
            f"nothing is recorded for {run.config.recipe}; tunebook list names the recipes that have evidence, and "
            "tunebook verify RUN RUN --record --label NAME records it",
            problem_id="no-evidence",
        )
    recorded = {file: read_evidence(file) for file in files}

    def distance(file: Path) -> tuple[int, int, bool, bool]:
        evidence = recorded[file]
        return (
            len(setting_differences(evidence.inputs, run.inputs)),
            len(content_differences(evidence.inputs, run.inputs)),
            bool(hardware_differences(evidence.hardware, run.hardware)),
            bool(split_differences(evidence.inputs, run.inputs)),
        )

    nearest = min(files, key=distance)
    require_same_settings(
        recorded[nearest].inputs,
        run.inputs,
        f"the run has other settings than the nearest evidence (tunebook reproduce {nearest} trains those)",
    )
    return claim_of_evidence(nearest, recorded[nearest])


def _record(runs: list[RunFacts], label: str, recipes_dirs: list[Path], console: Console, target: Target | None) -> int:
    """Write the evidence of repeated runs, whose claim is the first one's numbers, and show it on the card."""
    if not _LABEL.fullmatch(label):
        raise RequestError(
            f"--label {label}: a label is small letters, digits, dots and underscores, such as bf16 or random_weights",
            problem_id="evidence-label",
        )
    recipe = _recipe_of(runs[0])
    for run in runs:
        _require_complete(run)
    _require_repetitions(runs)
    folder = evidence_folder(recipe, recipes_dirs)
    card = folder.parent / "README.md"
    file = write_evidence(evidence_of(runs, label, recipes_dirs, target), folder)
    print_text(f"written: {file}", console)
    files = evidence_files(recipe, recipes_dirs)
    update_card(card, files)
    for page in (card.parents[1] / "README.md", card.parents[2] / "README.md"):
        update_overview(page, card, files)
    print_text(f"shown on {card}", console)
    return 0


def _recipe_of(run: RunFacts) -> str:
    if run.config.recipe is None:
        raise RequestError(
            f"{run.record.folder} has no recipe, and evidence belongs to one: write one (tunebook init NAME, with the "
            "same overrides) and train that, or compare it with another run: tunebook diff RUN RUN",
            problem_id="evidence-without-recipe",
        )
    return run.config.recipe


def _require_complete(run: RunFacts) -> None:
    """Raises: RequestError unless the run is of committed code and has the loss of every step."""
    code, folder = run.manifest["code"], run.record.folder
    if not code["is_clean"]:
        changes = code["reason"] or f"{code['git_commit']}, and changes"
        raise RequestError(
            f"{folder}: its code is not that of a commit ({changes}), so nobody could repeat it; train again from a "
            "checkout whose changes are committed",
            problem_id="evidence-of-changed-code",
        )
    if run.missing_steps:
        raise _not_repeated(
            f"{folder} has no finite loss of step {run.missing_steps[0]}, which another run would be compared with; "
            "train from the first step without interruption (training.resume=never)"
        )


def _not_repeated(message: str) -> RequestError:
    return RequestError(message, problem_id="evidence-not-repeated")


def _require_repetitions(runs: Sequence[RunFacts]) -> None:
    """Raises: RequestError unless there are two runs or more with the same inputs, split, software and GPUs."""
    first, *others = runs
    # Each line of the metrics has times, so no two trainings write equal ones.
    if len({sha256_file(run.record.folder / METRICS_FILE) for run in runs}) < max(2, len(runs)):
        raise _not_repeated(
            f"evidence needs two trainings or more: {first.record.folder} is alone, or another is a copy of it; train "
            "again (training.resume=never) and name both: tunebook verify RUN RUN --record --label NAME"
        )
    # The packages must be the same. The image and a CPU need not be.
    machines = [
        run.software.model_dump(exclude={"image_digest"}) | run.hardware.model_dump(include={"gpu", "gpus", "nodes"})
        for run in runs
    ]
    for other, machine in zip(others, machines[1:], strict=True):
        if differing := [
            *setting_differences(first.inputs, other.inputs),
            *content_differences(first.inputs, other.inputs),
            *split_differences(first.inputs, other.inputs),
            *flat_differences(machines[0], machine),
        ]:
            raise _not_repeated(
                f"{other.record.folder} is not a repetition of {first.record.folder}: {named(differing)}"
            )


def evidence_of(
    runs: Sequence[RunFacts], label: str, recipes_dirs: list[Path], target: Target | None = None
) -> Evidence:
    """The evidence of repeated runs. Raises: RequestError if a run missed the target."""
    first = runs[0]
    return Evidence(
        format=FORMAT,
        ran=first.description(recipes_dirs),
        hardware=first.hardware,
        label=label,
        recorded=f"{datetime.now(UTC):%Y-%m-%d}",
        repeats=[_repeat(run, target) for run in runs],
        results=first.results,
        target=target,
        tolerances=compute_tolerances([run.results for run in runs], first.config),
        inputs=first.inputs,
        software=first.software,
        content_sha256="",
    )


def _repeat(run: RunFacts, target: Target | None) -> Repeat:
    """A summary of one of the runs. Raises: RequestError if it missed the target."""
    reached = Progress(best=None)
    if target is not None:
        reached = progress_of(target, run.record)
        if reached.steps is None:
            raise RequestError(
                f"{run.record.folder} missed the target {describe_target(target)}: its best value is {reached.best}. "
                "State a target that every run reaches, leave --target out, or train longer",
                problem_id="evidence-target",
            )
    return Repeat(
        run=run.record.name,
        started=run.record.status["started"],
        final_loss=run.results.losses[-1],
        tokens_per_second_per_gpu=run.results.tokens_per_second_per_gpu,
        steps_to_target=reached.steps,
        time_to_target_s=reached.seconds,
    )
