"""What `tunebook fetch` does: find out what was meant, fetch it, say what could not be had."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.config.compose import compose
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.evaluate.bare_model import config_of
from tunebook.evaluate.needs.fetch import fetch_run, fetch_tasks, require_fetched
from tunebook.evaluate.suites import suite_settings


def fetch_command(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    suite: str | None,
    tasks: list[str] | None,
) -> None:
    """Fetch what a recipe with its overrides reads, or else what a suite or tasks do.

    Raises: RequestError for an unknown name, and with everything that could not be had.
    """

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    if suite is not None and tasks is not None:
        raise RequestError(
            f"suite={suite} and tasks={','.join(tasks)} are two answers to the same question; type one of them",
            problem_id="suite-and-tasks",
        )
    is_run = recipe is not None or bool(overrides)
    if not is_run and suite is None and not tasks:
        raise RequestError(
            "there is nothing named to fetch; type a recipe (its model, data and tasks), suite=leaderboard, or "
            "tasks=gsm8k,arc_easy",
            problem_id="nothing-to-fetch",
        )
    config = compose(recipe, overrides, recipes_dirs).config if is_run else config_of(ModelConfig(), is_bf16=False)
    asked = tasks or (suite_settings(suite, config).tasks if suite else [])
    problems = [*(fetch_run(config, say) if is_run else []), *(fetch_tasks(asked, say) if asked else [])]
    require_fetched(problems)
    say("everything is here")
