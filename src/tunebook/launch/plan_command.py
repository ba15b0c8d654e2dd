"""What `tunebook plan` and `tunebook train --dry-run` do: show a run without starting it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from tunebook.launch.draft import draft_json, draft_run
from tunebook.launch.job import Job, show_job
from tunebook.launch.show import show_memory


def plan_command(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    folder: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print the choices, the batch, the launch command for `folder` and the memory, or all as JSON; the exit code.

    JSON is printed whatever is wrong: problems are among its keys. Otherwise raises: RequestError or RulesError for a
    wrong request, DoesNotFitError (after printing) for a plan that cannot fit.
    """
    draft = draft_run(recipe, overrides, recipes_dirs)
    if as_json:
        json.dump(draft_json(draft), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
        return draft.exit_code
    draft.raise_errors()
    assert draft.resolution is not None and draft.batch is not None and draft.memory is not None
    job = Job(resolution=draft.resolution, problems=draft.problems, plan=draft.batch)
    show_job(job, console, folder or Path(job.config.outputs) / (recipe or "custom") / "<time>")
    show_memory(draft.memory, console)
    draft.raise_if_too_large()
    return 0
