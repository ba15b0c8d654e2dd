"""The arguments and options of the command line that several commands share or that take many words to explain."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tunebook.config.book import book_root, find_recipes
from tunebook.errors import RequestError, TunebookError, did_you_mean


def complete_recipe(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes that a shell completes a word to: none after the first word, and none where they cannot be read.

    It runs at every press of the key, so it reads names of files only: no YAML, no Hydra.
    """
    if ctx.params.get("words"):  # what follows the recipe is KEY=VALUE
        return []
    try:
        return [name for name in find_recipes(ctx.params.get("recipes_dir") or []) if name.startswith(incomplete)]
    except TunebookError:  # a shell has no place for a message; the command itself prints it
        return []


def complete_model(incomplete: str) -> list[str]:
    """The models of the book that a shell completes a word to."""
    return _complete_choice("model", incomplete)


def complete_parallelism(incomplete: str) -> list[str]:
    """The strategies that a shell completes a word to."""
    return _complete_choice("parallelism", incomplete)


def _complete_choice(group: str, incomplete: str) -> list[str]:
    try:
        names = sorted(file.stem for file in (book_root() / "hydra_configs" / group).glob("*.yaml"))
    except TunebookError:
        return []
    return [name for name in names if name.startswith(incomplete)]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, then Hydra overrides.", autocompletion=complete_recipe
    ),
]
RecipesDir = Annotated[
    list[Path] | None,
    typer.Option("--recipes-dir", help="A folder with recipes of your own; may be given again. Also TUNEBOOK_RECIPES."),
]
RunFolder = Annotated[
    Path | None, typer.Option("--run-folder", help="Make the run here instead of in outputs/<recipe>/<time>.")
]
Outputs = Annotated[Path, typer.Option("--outputs", help="The folder that holds the run folders.")]

# Of a new recipe.
NewModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="ORGANIZATION/NAME of the hub, a folder, or a file of hydra_configs/model.",
        autocompletion=complete_model,
    ),
]
NewData = Annotated[
    str | None,
    typer.Option("--data", help="A file, a quoted glob, ORGANIZATION/NAME, or a file of hydra_configs/dataset."),
]
NewParallelism = Annotated[
    str | None,
    typer.Option("--parallelism", help="If unset, the base's, or auto.", autocompletion=complete_parallelism),
]
NewBase = Annotated[
    str | None,
    typer.Option("--base", metavar="RECIPE", help="Build on this recipe.", autocompletion=complete_recipe),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a recipe of that name.")]

# Of an evaluation.
NumFewshot = Annotated[
    int | None, typer.Option("--num-fewshot", min=0, help="Examples before each item; if unset, the task's own.")
]
BatchSize = Annotated[
    str | None,
    typer.Option("--batch-size", help="Requests computed at once, or auto: the most that the memory takes."),
]
AllowMismatch = Annotated[
    str,
    typer.Option(
        "--allow-mismatch",
        help="What may differ from the training: template, tokenizer, system_prompt, base, with commas; recorded.",
    ),
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="That share the requests; if unset, one for each GPU.")
]


# Of an export.
class ExportFormat(StrEnum):
    """The number formats that weights can be exported in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


# Of a sweep.
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        help="Trials at a time; if unset, 1, in a Slurm job array 8. On this machine the GPUs are divided evenly.",
    ),
]
NumTrials = Annotated[
    int | None,
    typer.Option(
        "--num-trials",
        min=1,
        help="Search with this many trials instead of all combinations, with Optuna: key=interval(1e-6,1e-4), "
        "tag(log,interval(...)), int(interval(1,8)), range(8,65,8) or a,b,c.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="What ranks the trials: evaluation_score, validation_loss, final_loss, tokens_per_second_per_gpu or "
        "seconds; if unset, the first of these that they measure.",
    ),
]
SearchSeed = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**31 - 1, help="Of a search's proposals; if unset, 0.")
]
Prune = Annotated[
    int | None,
    typer.Option("--prune", min=1, help="From this step on, end trials that are worse than the median of 5 or more."),
]


def split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """A recipe's name, if the first word is one, and the overrides."""
    first, *rest = words or [""]
    if first and "=" not in first and not first.startswith(("+", "~")):
        return first, rest
    return None, [word for word in (first, *rest) if word]


def settings(words: list[str] | None, known: tuple[str, ...]) -> dict[str, str]:
    """`key=value` words of a command that composes nothing; a single bare word is the first key's value.

    Raises: RequestError for an unknown key, with the nearest, and for a key that is set twice.
    """
    given: dict[str, str] = {}
    for word in words or []:
        key, has_value, value = word.partition("=")
        if not has_value:
            key, value = known[0], word
        if key not in known:
            raise RequestError(
                f"there is no setting '{key}' here.{did_you_mean(key, known)} Settings: {', '.join(known)}",
                problem_id="unknown-key",
            )
        if key in given:
            raise RequestError(
                f"'{word}' sets {key} once more, after {key}={given[key]}; type one of them", problem_id="setting-twice"
            )
        given[key] = value
    return given


def named_run(word: str) -> str:
    """The run that a word names, also as `run=RUN` where it is a command's only setting.

    Raises: RequestError where nothing follows.
    """
    key, has_value, value = word.partition("=")
    if not has_value or key not in ("run", "runs", "model") or Path(word).exists():
        return word
    if not value:
        raise RequestError(
            f"'{word}' names no run; type {key}=FOLDER, {key}=RECIPE for its newest run, or {key}=latest",
            problem_id="unknown-run",
        )
    return value


def task_names(given: dict[str, str]) -> list[str] | None:
    """The tasks that were named, by either spelling of the setting; None where none was."""
    if "tasks" not in given and "task" not in given:
        return None
    texts = [given[key].strip("[]") for key in ("tasks", "task") if key in given]
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
