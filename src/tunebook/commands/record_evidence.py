"""`verify --record`: write evidence from repeated runs, after checking that they are repetitions of one run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunebook.commands.typed_command import require_same_run
from tunebook.config.book import book_root
from tunebook.config.identity import flat_differences
from tunebook.config.recipe_files import load_recipes
from tunebook.errors import RequestError
from tunebook.evidence.compare import input_differences, split_differences
from tunebook.evidence.files import check_label, evidence_folder, write_evidence
from tunebook.evidence.gather import RunFacts
from tunebook.evidence.run_checks import require_every_loss, require_first_step
from tunebook.evidence.schema import FORMAT, Repeat, Target, Tolerance
from tunebook.evidence.target import Progress, describe_target, progress_of, require_measured
from tunebook.evidence.tolerances import (
    SAME_PROCESSOR_FLOOR,
    SPEED,
    compute_tolerances,
    elsewhere_tolerances,
    why_slowed,
)
from tunebook.files import sha256_file
from tunebook.record.metrics import METRICS_FILE
from tunebook.record.provenance import why_not_committed
from tunebook.record.run_record import RunRecord
from tunebook.record.start_up import START_UP_KEY

MIN_RUNS = 2


def record_evidence(
    runs: Sequence[RunFacts], label: str, recipes_dirs: list[Path], target: Target | None = None
) -> Path:
    """Write the evidence of repeated runs; the claim is the first one's numbers.

    Raises: RequestError for fewer than two runs, for runs with different inputs or software, for a copy of a run, for
    one that resumed from another or lacks a loss, for code or a recipe that is not committed or was changed since, for
    a loss or score that is not finite, for a target that a run missed or does not measure, and if the file exists.
    """
    check_label(label)
    refuse_too_few(runs)
    for run in runs:
        _require_committed(run)
        require_first_step(run.record, run.config)
    _require_same(runs)
    _refuse_copies(runs)
    first = runs[0]
    recipe = first.config.recipe
    _require_committed_recipe(recipe, recipes_dirs)
    for run in runs:
        require_every_loss(run.record, run.results)
    require_same_run(first, recipes_dirs)
    if recipe is None:
        raise RequestError(
            f"{first.record.folder} has no recipe, and evidence belongs to one: put its settings into "
            "recipes/NAME.yaml",
            problem_id="evidence-without-recipe",
        )
    content: dict[str, Any] = {
        "format": FORMAT,
        "ran": first.description(recipes_dirs).model_dump(mode="json"),
        "hardware": first.hardware.model_dump(mode="json"),
        "label": label,
        "recorded": f"{datetime.now(UTC):%Y-%m-%d}",
        "repeats": _repeats(runs, target),
        "results": first.results.model_dump(mode="json"),
        "target": None if target is None else target.model_dump(mode="json"),
        **_tolerances(runs),
        "inputs": first.inputs.model_dump(mode="json"),
        "software": first.software.model_dump(mode="json"),
    }
    return write_evidence(content, evidence_folder(recipe, recipes_dirs))


def _repeats(runs: Sequence[RunFacts], target: Target | None) -> list[dict[str, Any]]:
    """A summary of each run. Raises: RequestError if one missed the target."""
    progress = [Progress(best=None) if target is None else _reached(target, run.record) for run in runs]
    first = runs[0].hardware.processor
    return [
        Repeat(
            run=run.record.name,
            started=run.record.status["started"],
            final_loss=run.results.losses[-1],
            tokens_per_second_per_gpu=run.results.tokens_per_second_per_gpu,
            processor=None if run.hardware.processor == first else run.hardware.processor,
            steps_to_target=found.steps,
            time_to_target_s=found.seconds,
        ).model_dump(mode="json")
        for run, found in zip(runs, progress, strict=True)
    ]


def _reached(target: Target, record: RunRecord) -> Progress:
    """When a run reached the target. Raises: RequestError if it missed it or does not measure it."""
    require_measured(target, record)
    found = progress_of(target, record)
    if found.steps is None:
        best = "it has no value" if found.best is None else f"its best value is {found.best:.5g}"
        raise RequestError(
            f"{record.folder} missed the target {describe_target(target)}: {best}. Evidence is a claim that its runs "
            "meet: state a target that they reach, leave --target out, or train longer",
            problem_id="evidence-target",
        )
    return found


def _tolerances(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """The tolerances, and on a CPU those for other processors. Raises: RequestError if the first one was used once."""
    first, config, results = runs[0].hardware.processor, runs[0].config, [run.results for run in runs]
    same = [run.results for run in runs if run.hardware.processor == first]
    if first is None and len(same) == len(results):  # GPUs, or runs from before processors were recorded
        return {"tolerances": _dumped(compute_tolerances(results, config))}
    if len(same) < MIN_RUNS:
        raise RequestError(
            f"only {runs[0].record.folder} ran with its processor, instructions and threads: name another run like it; "
            "runs with others may follow",
            problem_id="evidence-not-repeated",
        )
    tolerances = compute_tolerances(same, config, SAME_PROCESSOR_FLOOR)
    if any(why_slowed(result) is not None for result in same):
        tolerances.pop(SPEED, None)
    elsewhere = elsewhere_tolerances(results, config, num_others=len(results) - len(same))
    return {"tolerances": _dumped(tolerances), "tolerances_elsewhere": _dumped(elsewhere)}


def _dumped(tolerances: dict[str, Tolerance]) -> dict[str, Any]:
    return {key: tolerance.model_dump(mode="json") for key, tolerance in tolerances.items()}


def refuse_too_few(runs: Sequence[RunFacts]) -> None:
    """Raises: RequestError for fewer than two different runs."""
    folders = {run.record.folder for run in runs}
    if len(folders) < len(runs):
        problem = "the same one is named twice"
    elif len(folders) < MIN_RUNS:
        problem = f"{len(runs)} was named"
    else:
        return
    raise RequestError(
        f"evidence needs at least {MIN_RUNS} runs of the same configuration, and {problem}: train it again "
        "(training.resume=never) and name both: tunebook verify RUN RUN --record --label NAME",
        problem_id="evidence-not-repeated",
    )


def _refuse_copies(runs: Sequence[RunFacts]) -> None:
    """Raises: RequestError for a copy of another run.

    Each line of the metrics has times, so no two trainings write equal metrics. A copy with edited metrics still has
    the other's start: its second, and the milliseconds of its phases.
    """
    folders: dict[str, Path] = {}
    for run in runs:
        record, manifest = run.record, run.manifest
        start = (manifest["hardware"]["host"], record.status["started"], manifest.get(START_UP_KEY))
        for kept, same in (
            (sha256_file(record.folder / METRICS_FILE), f"every line of their {METRICS_FILE} is the same"),
            (repr(start), f"both were started on the same machine at {record.status['started']}"),
        ):
            first = folders.setdefault(kept, record.folder)
            if first != record.folder:
                raise RequestError(
                    f"{record.folder} is a copy of {first}: {same}. Train it again (training.resume=never) and name "
                    "both runs",
                    problem_id="evidence-not-repeated",
                )


def _require_committed(run: RunFacts) -> None:
    code = run.manifest.get("code") or {}
    if code.get("git_commit") is None:
        why = f"its code is of no known commit ({code.get('reason') or 'its manifest says none'})"
    elif not code.get("is_clean"):
        why = f"its code was changed after commit {code['git_commit'][:12]}"
    else:
        return
    raise RequestError(
        f"{run.record.folder}: {why}, so nobody could repeat it; commit the changes and train again",
        problem_id="evidence-of-changed-code",
    )


def _require_committed_recipe(recipe: str | None, recipes_dirs: list[Path]) -> None:
    """Check recipes from outside the book. Those of the book are in the commit that the manifest names."""
    files = [found.file for found in load_recipes(recipe, recipes_dirs)] if recipe is not None else []
    for file in files:
        if not file.is_relative_to(book_root()) and (why := why_not_committed(file)):
            raise RequestError(
                f"{file}: {why}, so nobody could repeat the run; commit the recipe and record again",
                problem_id="evidence-of-changed-code",
            )


def _require_same(runs: Sequence[RunFacts]) -> None:
    """Raises: RequestError unless inputs, split, software and hardware are the same in all runs."""
    first, *others = runs
    for other in others:
        # The packages must be the same, the image need not be.
        software, found = (run.software.model_dump(exclude={"image_digest"}) for run in (first, other))
        if differing := [
            *input_differences(first.inputs, other.inputs),
            *split_differences(first.inputs, other.inputs),
            *flat_differences(software, found),
        ]:
            key, one, two = differing[0]
            raise RequestError(
                f"{other.record.folder} is not a repetition of {first.record.folder}: {key} is {two}, not {one}",
                problem_id="evidence-not-repeated",
            )
        here, there = first.hardware, other.hardware
        if (there.gpu, there.gpus, there.nodes) != (here.gpu, here.gpus, here.nodes):
            raise RequestError(
                f"{other.record.folder} ran on other hardware than {first.record.folder}: {there.gpus} x "
                f"{there.gpu or 'CPU'}, not {here.gpus} x {here.gpu or 'CPU'}",
                problem_id="evidence-not-repeated",
            )
