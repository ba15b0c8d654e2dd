"""What to say where a disk fills up during an evaluation, which writes to several."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tunebook.errors import DoesNotFitError
from tunebook.hardware.disk import existing, no_space


def full_disk(results: Path, command: str) -> DoesNotFitError:
    """The error for the one that has the least room left; libraries seldom say which file they were writing.

    `command` goes on with the evaluation.
    """
    from huggingface_hub import constants

    temporary, hub = Path(tempfile.gettempdir()), Path(constants.HF_HOME)
    again = f"then {command} takes the tasks that are finished"
    advice = {
        results: f"free some space, {again}",
        temporary: f"free some space or use another disk, TMPDIR=FOLDER in front of the command; {again}",
        hub: f"free some space or use another disk, HF_HOME=FOLDER in front of the command; {again}",
    }
    fullest = min(advice, key=_free)  # the first of those that share a disk
    return no_space("the evaluation", fullest, advice[fullest])


def _free(folder: Path) -> int:
    return shutil.disk_usage(existing(folder)).free
