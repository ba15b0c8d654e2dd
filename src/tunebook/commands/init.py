"""`tunebook init`: write what is typed as a recipe file, and compose it before it is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.console import Console

from tunebook.config.book import OWN_RECIPES, users_folders
from tunebook.config.choices import Source
from tunebook.config.compose import compose, parse_overrides
from tunebook.config.override_text import command_words, shell_command
from tunebook.config.schema import GROUPS
from tunebook.data.files import missing_files
from tunebook.errors import RequestError, TunebookError, first_line
from tunebook.files import atomic_write_text
from tunebook.terminal import print_text

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def init_command(
    name: str | None, base: str | None, overrides: list[str], recipes_dirs: list[Path], console: Console
) -> Path:
    """Write the recipe `name` and print the commands to continue with; return the file.

    It is written to the first folder of `recipes_dirs`, else of TUNEBOOK_RECIPES, else to `my_recipes`.
    Raises: RequestError, DataError for files that hold no documents; then no recipe is written.
    """
    if name is None or (base is None and not overrides):
        raise RequestError(
            "type a name and what you would train, such as `tunebook init mine chats.jsonl model=ORG/NAME`",
            problem_id="init-incomplete",
        )
    folder = next(iter(users_folders(recipes_dirs)), OWN_RECIPES)
    file = folder.expanduser() / f"{name}.yaml"
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"'{name}' is no name of a recipe: type letters, digits, _ and -; --recipes-dir names the folder",
            problem_id="recipe-name-form",
        )
    if file.exists():
        raise RequestError(f"{file} exists already; type another name, or remove it", problem_id="recipe-exists")
    composition = compose(base, overrides, recipes_dirs)
    config, chosen = composition.config, composition.groups
    names = [config.model.run, config.model.name, config.model.path]
    if not any(names):
        raise RequestError("no model is named: add model=ORG/NAME or model=FOLDER", problem_id="init-incomplete")
    if config.dataset.source is Source.files and config.dataset.path is None:
        raise RequestError(
            "no data is named: add a file, such as chats.jsonl, or a folder", problem_id="init-incomplete"
        )
    if missing := missing_files(config.dataset):
        raise missing
    model = next(filter(None, names)) if chosen["model"] == str(None) else chosen["model"]  # a group without a choice
    title = f"Built on {base}" if base else f"{model} on {config.dataset.path or chosen['dataset']}"
    text = recipe_text(name, base, overrides, title)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, text)
    except OSError as error:
        raise RequestError(
            f"{file} cannot be written: {first_line(error)}; name another folder with --recipes-dir DIR",
            problem_id="recipe-not-written",
        ) from error
    try:
        compose(name, [], recipes_dirs)
    except TunebookError:
        file.unlink()
        raise
    print_text(f"written: {file}\nNext:", console)
    for command in ("data", "plan", "train"):
        print_text(f"  {shell_command(command_words(command, name, [], recipes_dirs[:1]))}", console)
    return file


def recipe_text(name: str, base: str | None, overrides: list[str], title: str) -> str:
    """The recipe as YAML: the base, the choices, and the other settings."""
    choices: dict[str, str] = {}
    body: Any = OmegaConf.create()
    for override in parse_overrides(overrides):
        key, value = override.key_or_group, override.value()
        if key in GROUPS and not isinstance(value, dict):
            choices[key] = str(value)
        else:
            OmegaConf.update(body, key, value)
    settings: Any = OmegaConf.to_container(body)
    defaults = [*([base] if base else []), *({f"override /{group}": choice} for group, choice in choices.items())]
    return (
        "# @package _global_\n"
        f"# Written by `tunebook init {name}`. What is not here keeps its default; `tunebook plan` shows it.\n"
        + yaml.safe_dump(
            {"defaults": [*defaults, "_self_"], "title": title} | settings,
            sort_keys=False,
            allow_unicode=True,
            width=10**6,
        )
    )
