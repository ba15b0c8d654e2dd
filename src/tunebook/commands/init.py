"""`tunebook init`: write a recipe file, and compose it before it is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from tunebook.config.book import is_in_book, resolve_path, users_folders
from tunebook.config.compose import compose
from tunebook.config.override_text import command_words, shell_command
from tunebook.config.recipe_files import group_choices
from tunebook.data.files import SUFFIXES, find_files
from tunebook.errors import RequestError, TunebookError, did_you_mean
from tunebook.files import atomic_write_text
from tunebook.terminal import print_text

DEFAULT_FOLDER = Path("my_recipes")  # not recipes/: in a checkout that is the book, whose tests ask for a card
GLOBAL_SAMPLES = 64  # documents per optimizer step; the size that docs/data.md trains with
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_GENERAL = ("hub", "jsonl", "mixture")  # choices that need keys of their own
_MODEL = "ORGANIZATION/NAME of the hub, a folder"
_DATA = "ORGANIZATION/NAME of the hub, a file, a glob such as 'chats/*.jsonl'"


def init_command(
    name: str,
    recipes_dirs: list[Path],
    console: Console,
    *,
    model: str | None = None,
    data: str | None = None,
    parallelism: str | None = None,
    base: str | None = None,
) -> Path:
    """Write the recipe `name` and print the commands to continue with; return the file.

    It is written to the first folder of `recipes_dirs`, else of TUNEBOOK_RECIPES, else to `my_recipes`.
    Raises: RequestError, DataError for files that hold no documents; then no recipe is written.
    """
    folder = next(iter(users_folders(recipes_dirs)), DEFAULT_FOLDER)
    file = folder.expanduser() / f"{name}.yaml"
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"'{name}' is no name of a recipe: type letters, digits, _ and -; --recipes-dir names the folder",
            problem_id="recipe-name-form",
        )
    if file.exists():
        raise RequestError(f"{file} exists already; type another name, or remove it", problem_id="recipe-exists")
    if base is None and not (model and data):
        raise RequestError(
            "a recipe without a base needs --model ORGANIZATION/NAME and --data 'chats/*.jsonl'; or type --base RECIPE "
            "to build on another",
            problem_id="init-incomplete",
        )
    text = recipe_text(name, model=model, data=data, parallelism=parallelism, base=base)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, text)
    try:
        compose(name, [], [folder, *recipes_dirs[1:]])
    except TunebookError:
        file.unlink()
        raise
    print_text(f"written: {file}\nNext:", console)
    for command, options in (("data", []), ("plan", []), ("train", ["--dry-run"]), ("train", [])):
        print_text(f"  {shell_command([*command_words(command, name, [], [folder]), *options])}", console)
    return file


def recipe_text(name: str, *, model: str | None, data: str | None, parallelism: str | None, base: str | None) -> str:
    """The recipe as YAML. Without a base it states the batch, which has no default."""
    choices: dict[str, str] = {}
    recipe: dict[str, Any] = {"title": f"Built on {base}" if base else f"{model} on {data}"}
    if model:
        choices["model"], recipe["model"] = model_choice(model)
    if data:
        choices["dataset"], recipe["dataset"] = data_choice(data)
    if parallelism:
        choices["parallelism"] = parallelism
    if base is None:
        recipe["training"] = {"global_samples": GLOBAL_SAMPLES}
    overrides = [{f"override /{group}": choice} for group, choice in choices.items()]
    defaults = [*([base] if base else []), *overrides, "_self_"]
    body = {"defaults": defaults} | {key: value for key, value in recipe.items() if value}
    return (
        "# @package _global_\n"
        f"# Written by `tunebook init {name}`. What is not here keeps its default; `tunebook plan` shows it.\n"
        + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=10**6)
    )


def model_choice(text: str) -> tuple[str, dict[str, str]]:
    """The choice of the group `model` and its keys: a model of the book, a folder, or one of the hub."""
    known = [choice for choice in group_choices("model") if choice not in _GENERAL]
    if text in known:
        return text, {}
    if resolve_path(text).is_dir():
        return "hub", {"path": text}
    if "/" in text:
        return "hub", {"name": text}
    raise RequestError(
        f"--model {text}: there is no such model.{did_you_mean(text, known)} Type {_MODEL}, or one of: "
        f"{', '.join(known)}",
        problem_id="init-model",
    )


def data_choice(text: str) -> tuple[str, dict[str, str]]:
    """The choice of the group `dataset` and its keys: a data set of the book, files, or one of the hub."""
    known = [choice for choice in group_choices("dataset") if choice not in _GENERAL]
    if text in known:
        return text, {}
    if is_in_book(text) or text.lower().endswith(SUFFIXES) or "*" in text or resolve_path(text).exists():
        find_files(text, "--data")
        return "jsonl", {"path": text}
    if "/" in text:
        return "hub", {"name": text}
    raise RequestError(
        f"--data {text}: there is no such data set or file.{did_you_mean(text, known)} Type {_DATA}, or one of: "
        f"{', '.join(known)}",
        problem_id="init-data",
    )
