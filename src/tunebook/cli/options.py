"""Arguments and options that several commands share, and the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tunebook.config.book import YAML_SUFFIXES, find_recipes
from tunebook.config.override_text import override
from tunebook.data.files import SUFFIXES
from tunebook.errors import RequestError, did_you_mean

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [DATA] [KEY=VALUE]...",
        help="A recipe, by its name or its YAML file; a file, folder or quoted glob of data; settings, such as "
        "model=ORG/NAME or training.num_epochs=2.",
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


def split(words: list[str] | None, recipes_dirs: list[Path] | None = None) -> tuple[str | None, list[str]]:
    """The recipe among the words, and the overrides; DATA is `dataset=file dataset.path=DATA`.

    Raises: RequestError for two recipes, two of data, and the folder of a model.
    """
    recipe, data, overrides = None, None, []
    for word in filter(None, words or []):
        if "=" in word or word.startswith("+") or (word.startswith("~") and "/" not in word):
            overrides.append(word)
        elif not _is_data(word, recipes_dirs or []):
            if recipe is not None:
                raise _two_words("recipes", recipe, word, "other settings are typed key=value")
            recipe = word
        else:
            if data is not None:
                raise _two_words("data", data, word, "for several files type their folder, or a glob in quotes")
            data = word
    return recipe, [*(["dataset=file", override("dataset.path", data)] if data else []), *overrides]


def _is_data(word: str, recipes_dirs: list[Path]) -> bool:
    """Whether a word names data: it ends like a file of documents, is a glob, or exists and no recipe has its name."""
    if word.endswith(YAML_SUFFIXES):
        return False
    if word.lower().endswith(SUFFIXES) or "*" in word:
        return True
    if not Path(word).expanduser().exists() or ("/" not in word and word in find_recipes(recipes_dirs)):
        return False
    if (Path(word).expanduser() / "config.json").is_file():
        raise RequestError(f"{word} is the folder of a model: type model={word}", problem_id="word-is-a-model")
    return True


def _two_words(kind: str, one: str, other: str, instead: str) -> RequestError:
    return RequestError(f"'{one}' and '{other}' are both {kind}; name one ({instead})", problem_id="two-words")


def settings(words: list[str] | None, known: tuple[str, ...]) -> dict[str, str]:
    """`key=value` words of a command that composes nothing; a single bare word is the first key's value.

    Raises: RequestError for an unknown key, with the nearest, a key that is set twice, and two that exclude each other.
    """
    typed: dict[str, str] = {}
    listed = ", ".join(f"{key}=" for key in known)
    for word in words or []:
        key, has_value, value = word.partition("=")
        if not has_value:
            key, value = known[0], word
        if key not in known:
            raise RequestError(
                f"there is no setting '{key}' here.{did_you_mean(key, known, f'Settings: {listed}')}",
                problem_id="unknown-key",
            )
        if key in typed:
            raise RequestError(
                f"'{word}' sets {key} once more, after {key}={typed[key]}; type one of them", problem_id="setting-twice"
            )
        typed[key] = value
    for first, second in (("run", "model"), ("suite", "tasks")):
        if first in typed and second in typed:
            raise RequestError(
                f"{first}={typed[first]} and {second}={typed[second]} exclude each other; type one of them",
                problem_id=f"{first}-and-{second}",
            )
    return typed


def task_names(typed: dict[str, str]) -> list[str] | None:
    """The tasks of `tasks=a,b`, also in brackets; None if it was not typed."""
    if "tasks" not in typed:
        return None
    return [name.strip() for name in typed["tasks"].strip("[]").split(",") if name.strip()]


def make_console() -> Console:
    """Without a terminal rich assumes 80 columns, which breaks paths and commands that people copy."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
