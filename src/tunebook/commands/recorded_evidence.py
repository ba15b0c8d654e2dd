"""The recorded evidence that a run is compared with, and the comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tunebook.commands.typed_command import command_of
from tunebook.errors import RequestError
from tunebook.evidence.compare import (
    Claim,
    config_differences,
    input_differences,
    named_differences,
    same_machine,
    split_differences,
)
from tunebook.evidence.files import evidence_files, read_evidence
from tunebook.evidence.gather import RunFacts
from tunebook.evidence.schema import Evidence, Inputs, Target
from tunebook.evidence.target import require_measured
from tunebook.evidence.tolerances import judged_tolerances
from tunebook.evidence.verifying import Verification, compare_run, describe
from tunebook.record.run_folder import WITHOUT_RECIPE


def verify(
    run: RunFacts, recipes_dirs: list[Path], against: Path | None = None, target: Target | None = None
) -> Verification:
    """Compare a finished run with the recipe's evidence, or with one file; `target` replaces the recorded target.

    Raises: RequestError if there is no evidence of the same run or the run does not measure the target, DataError for a
    damaged file.
    """
    claim = claim_of_evidence(run, recipes_dirs, against)
    if target is not None:
        require_measured(target, run.record)
        repeats = [one.model_copy(update={"steps_to_target": None}) for one in claim.repeats]  # of another target
        claim = replace(claim, target=target, repeats=repeats)
    return compare_run(claim, run)


def claim_of_evidence(run: RunFacts, recipes_dirs: list[Path], against: Path | None = None) -> Claim:
    """The evidence of the same run, preferably on the same machine. Raises: RequestError if there is none."""
    file, found = _choose(run, recipes_dirs, against)
    return Claim(
        name=file.name,
        what=f"{found.kind}, recorded on {found.recorded}: {describe(found.ran)}",
        results=found.results,
        hardware=found.hardware,
        inputs=found.inputs,
        software=found.software,
        tolerances=judged_tolerances(found),
        elsewhere=found.tolerances_elsewhere,
        target=found.target,
        repeats=found.repeats,
    )


def _choose(run: RunFacts, recipes_dirs: list[Path], against: Path | None) -> tuple[Path, Evidence]:
    """The evidence of the same run, preferably of the same machine and then of a step that is split alike."""
    recipe = run.config.recipe or WITHOUT_RECIPE
    if against is not None and not against.is_file():
        raise RequestError(
            f"--against {against} is not a file; name one of recipes/NAME/evidence, or omit --against to compare with "
            "the recipe's own evidence",
            problem_id="no-evidence",
        )
    if run.config.recipe is None and against is None:
        raise RequestError(
            "this run has no recipe, and evidence belongs to one: put its settings into recipes/NAME.yaml and train "
            "that twice to record evidence, or compare this run with another: tunebook diff RUN RUN",
            problem_id="evidence-without-recipe",
        )
    files = [against] if against is not None else evidence_files(recipe, recipes_dirs)
    if not files:
        raise RequestError(
            f"nothing is recorded for {recipe}; tunebook list names the recipes that have evidence, and "
            "tunebook verify RUN RUN --record --label NAME records it",
            problem_id="no-evidence",
        )
    known = [(file, read_evidence(file)) for file in files]
    fitting = [(file, found) for file, found in known if not input_differences(found.inputs, run.inputs)]
    if not fitting:
        raise _no_evidence_of_this_run(recipe, known, run.inputs, recipes_dirs)

    def nearness(one: tuple[Path, Evidence]) -> tuple[bool, bool, str]:
        file, found = one
        is_elsewhere = same_machine(found.hardware, run.hardware) is not None
        return is_elsewhere, bool(split_differences(found.inputs, run.inputs)), file.name

    return min(fitting, key=nearness)


def _no_evidence_of_this_run(
    recipe: str, known: list[tuple[Path, Evidence]], inputs: Inputs, recipes_dirs: list[Path]
) -> RequestError:
    """The error with the nearest evidence, its differences, and how to check that claim."""
    file, nearest = min(known, key=lambda one: len(input_differences(one[1].inputs, inputs)))
    differing = named_differences(input_differences(nearest.inputs, inputs))
    command = command_of(nearest, recipes_dirs)
    if command is not None and config_differences(nearest.inputs.config, inputs.config):
        advice = f"To check that claim: {command}"
    else:
        advice = (
            f"The book, or a file that it reads, was changed since commit {nearest.software.git_commit[:12]}: check "
            f"that commit out to check the claim, or remove {file} and record it again (tunebook verify RUN RUN "
            f"--record --label {nearest.label})"
        )
    what = f"the evidence of {recipe} is of other runs. Nearest is {file.name}: {differing}."
    if nearest.ran.recipe != recipe:  # --against named the file
        own = "no recipe" if recipe == WITHOUT_RECIPE else recipe
        what = (
            f"{file.name} is evidence of {nearest.ran.recipe}, and the run is of {own}: {differing}. A run is compared "
            "with the evidence of its own recipe, which needs no --against."
        )
    return RequestError(f"{what} {advice}", problem_id="evidence-of-other-config")
