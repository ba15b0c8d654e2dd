"""What to type so that an evaluation that did not come to its end goes on: it may be part of a training."""

from __future__ import annotations

import shlex
from pathlib import Path

from tunebook.checkpoint.candidates import same_command
from tunebook.config.frozen import load_config
from tunebook.record.files import RUN_FILE

BEFORE, AFTER = "before", "after"


def what_goes_on(run: Path, when: str) -> str:
    """What evaluates no more than what is left; any evaluation but a training's own has a command of its own."""
    if when not in (BEFORE, AFTER):
        return "the same command"
    # Before the first step there is no progress that a new start would look for: it has to be sent to the folder.
    option = f"--run-folder {shlex.quote(str(run))}" if when == BEFORE else ""
    return same_command(load_config(run / RUN_FILE), option)
