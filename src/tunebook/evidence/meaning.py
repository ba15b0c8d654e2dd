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
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.compare import config_differences, input_differences, named_differences
from tunebook.evidence.machines import machine_of_evidence
from tunebook.evidence.schema import Evidence, Inputs, Ran
from tunebook.launch.draft import draft_run
from tunebook.record.config_hash import comparable_config
from tunebook.record.files import RUN_FILE

if TYPE_CHECKING:
    from tunebook.hardware.detect import Machine

NO_RECIPE = "custom"


def command_of(evidence: Evidence, recipes_dirs: list[Path]) -> str | None:
    """What trains the recorded claim; None where the words come to something else now, on a machine like its own."""
    config = _meaning(evidence.ran, machine_of_evidence(evidence.hardware), recipes_dirs)
    if config is None or config_differences(evidence.inputs.config, comparable_config(config)):
        return None
    words = evidence.ran.overrides
    # Older evidence does not say by which launcher. What was run on one node needs no cluster, which not everyone has.
    is_told = config.launcher.name is LauncherName.local or any(word.startswith("launcher=") for word in words)
    here = [] if is_told or evidence.hardware.nodes > 1 else ["launcher=local"]
    return shlex.join(["tunebook", "train", evidence.ran.recipe, *words, *here])


def require_meant(run: Path, ran: Ran, inputs: Inputs, machine: Machine, recipes_dirs: list[Path]) -> None:
    """Whether recipe and words still train what the run trained, on its own machine. Raises: RequestError."""
    there = typed_in_of(run / RUN_FILE)  # where relative paths start
    recipes_dirs = [folder.expanduser().absolute() for folder in recipes_dirs]
    with contextlib.chdir(there) if there is not None and there.is_dir() else contextlib.nullcontext():
        config = _meaning(ran, machine, recipes_dirs)
    if config is None:
        said = "does not compose any more"
    elif differing := input_differences(inputs, inputs.model_copy(update={"config": comparable_config(config)})):
        said = f"comes to something else now: {named_differences(differing)}"
    else:
        return
    raise RequestError(
        f"{run}: `{shlex.join(['tunebook', 'train', ran.recipe, *ran.overrides])}` {said}. The recipe, or what it "
        "reads, was changed since the run: take that back, or train it again as it is now (training.resume=never)",
        problem_id="evidence-of-changed-code",
    )


def _meaning(ran: Ran, machine: Machine, recipes_dirs: list[Path]) -> RunConfig | None:
    """What the words come to on a machine; None where they do not compose."""
    draft = draft_run(None if ran.recipe == NO_RECIPE else ran.recipe, ran.overrides, recipes_dirs, machine)
    return None if draft.resolution is None else draft.resolution.config
