"""Whether the words of evidence come to what was run, and the command that trains it again.

Words are composed anew wherever they are typed: a recipe or a group that was changed since makes another run of them.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.choices import LauncherName
from tunebook.config.frozen import typed_in_of
from tunebook.config.identity import comparable_config
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.compare import config_differences, input_differences, named_differences
from tunebook.evidence.machines import machine_of_evidence
from tunebook.evidence.schema import Evidence, Inputs
from tunebook.plan.draft import Draft, draft_run
from tunebook.record.files import RUN_FILE
from tunebook.record.run_folder import WITHOUT_RECIPE

if TYPE_CHECKING:
    from tunebook.hardware.detect import Machine


def command_of(evidence: Evidence, recipes_dirs: list[Path]) -> str | None:
    """What trains the recorded claim; None where the words come to something else now, on a machine like its own."""
    ran, machine = evidence.ran, machine_of_evidence(evidence.hardware)
    recipe = None if ran.recipe == WITHOUT_RECIPE else ran.recipe
    config = _config_of(draft_run(recipe, ran.overrides, recipes_dirs, machine))
    if config is None or config_differences(evidence.inputs.config, comparable_config(config)):
        return None
    # Older evidence does not say by which launcher. What was run on one node needs no cluster, which not everyone has.
    is_told = config.launcher.name is LauncherName.local or any(word.startswith("launcher=") for word in ran.overrides)
    here = [] if is_told or evidence.hardware.nodes > 1 else ["launcher=local"]
    return shlex.join(["tunebook", "train", ran.recipe, *ran.overrides, *here])


def require_meant(
    run: Path, recipe: str | None, words: list[str], inputs: Inputs, machine: Machine, recipes_dirs: list[Path]
) -> None:
    """Whether recipe and words still train what the run trained, on its own machine. Raises: RequestError."""
    there = typed_in_of(run / RUN_FILE)  # where relative paths start
    is_gone = there is not None and not there.is_dir()
    recipes_dirs = [folder.expanduser().absolute() for folder in recipes_dirs]
    with contextlib.nullcontext() if there is None or is_gone else contextlib.chdir(there):
        draft = draft_run(recipe, words, recipes_dirs, machine)
    config = _config_of(draft)
    if config is None:
        said = f"does not compose any more ({_why_not(draft)})"
    elif differing := input_differences(inputs, inputs.model_copy(update={"config": comparable_config(config)})):
        said = f"comes to something else now: {named_differences(differing)}"
    else:
        return
    moved = f"{there}, where it was typed, is gone, so that relative paths start here. " if is_gone else ""
    command = shlex.join(["tunebook", "train", *([recipe] if recipe else []), *words])
    raise RequestError(
        f"{run}: `{command}` {said}. {moved}The recipe, or what it reads, was changed since the run: take that back, "
        "or train it again as it is now (training.resume=never)",
        problem_id="evidence-of-changed-code",
    )


def _config_of(draft: Draft) -> RunConfig | None:
    return None if draft.resolution is None else draft.resolution.config


def _why_not(draft: Draft) -> str:
    """Why a draft has no configuration."""
    return draft.error.message if draft.error is not None else "; ".join(problem.message for problem in draft.problems)
