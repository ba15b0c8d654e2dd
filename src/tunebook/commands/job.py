"""Plan a run, and start its only rank meanwhile. Imports little, so that the rank starts soon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.choices import LauncherName
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig, world_size
from tunebook.hardware.detect import detect_machine
from tunebook.launch.commands import ranks_command
from tunebook.plan.auto.decisions import Decisions
from tunebook.plan.auto.hardware import decide_hardware
from tunebook.processes import EarlyStart
from tunebook.train.environment import rank_environment

if TYPE_CHECKING:
    from tunebook.plan.draft import Draft


def plan_job(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], early: EarlyStart | None = None
) -> Draft:
    """Compose, resolve and check a run; does not download or write anything, or import what needs a GPU.

    With `early`, a run's only rank starts once the run is composed.
    Raises: RequestError if it does not compose, RulesError with all broken rules at once.
    """
    composition = compose(recipe, overrides, recipes_dirs)
    if early is not None:
        _start_rank(early, composition.config)
    from tunebook.plan.draft import draft_run  # while the rank starts

    draft = draft_run(recipe, overrides, recipes_dirs, composition=composition)
    draft.raise_errors()
    return draft


def _start_rank(early: EarlyStart, composed: RunConfig) -> None:
    """Start a run's only rank, which imports the libraries while this process plans and prepares.

    Not before an evaluation: the rank would hold memory of the GPU during it.
    """
    decisions = Decisions(composed)
    decide_hardware(decisions, detect_machine())
    config, evaluation = decisions.config, composed.evaluation
    is_alone = config.launcher.name is LauncherName.local and world_size(config) == 1
    if is_alone and not (evaluation.tasks and evaluation.before):
        *command, _folder = ranks_command(config, Path())
        early.start(command, rank_environment(config, os.environ))
