"""Recipe files: a recipe builds on others by naming them in its defaults, in the syntax of Hydra's defaults lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.config.book import book_root, is_in_book, recipe_file, resolve_path
from tunebook.config.schema import GROUPS
from tunebook.errors import RequestError, did_you_mean, first_line

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """One recipe as written: its group choices (`override /group: choice`) and its own values."""

    file: Path
    parents: list[str]
    choices: dict[str, str]
    body: dict[str, Any]


def group_choices(group: str) -> list[str]:
    """The choices of a config group, as a user types them."""
    return sorted(file.stem for file in (book_root() / "hydra_configs" / group).glob("*.yaml"))


def model_keys(text: str) -> dict[str, str] | None:
    """The key of a model that is typed as a folder or as ORG/NAME of the hub; None if it is neither."""
    if is_in_book(text) or resolve_path(text).is_dir():
        return {"path": text}
    return {"name": text} if _HUB_NAME.fullmatch(text) else None


def load_recipes(name: str, recipes_dirs: list[Path]) -> list[RecipeFile]:
    """The recipes that a recipe builds on, and itself as the last: the values of later ones replace those before.

    Raises: RequestError for an unknown recipe, broken YAML, or a circle of parents.
    """
    loaded: dict[str, RecipeFile] = {}
    _load(name, recipes_dirs, (), loaded)
    return list(loaded.values())


def _load(name: str, recipes_dirs: list[Path], above: tuple[str, ...], loaded: dict[str, RecipeFile]) -> None:
    if name in above:
        raise RequestError(
            f"recipe '{name}' builds on itself: {' -> '.join((*above, name))}; remove one of these from the defaults "
            "of the one before",
            problem_id="recipe-circle",
        )
    recipe = _read(recipe_file(name, recipes_dirs))
    for parent in recipe.parents:
        if parent not in loaded:
            _load(parent, recipes_dirs, (*above, name), loaded)
    loaded[name] = recipe


def _read(file: Path) -> RecipeFile:
    try:
        node = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or first_line(error)
        raise RequestError(f"{place}: this is not YAML: {problem}", problem_id="recipe-not-yaml") from error
    if not isinstance(node, DictConfig):
        raise RequestError(f"{file}: a recipe is a mapping of keys to values", problem_id="recipe-not-yaml")
    body: dict[str, Any] = OmegaConf.to_container(node, resolve=False)  # type: ignore[assignment]
    parents: list[str] = []
    choices: dict[str, str] = {}
    defaults = body.pop("defaults", [])
    if not isinstance(defaults, list) or "_self_" in defaults[:-1]:
        raise _wrong_defaults(file, str(defaults))
    for entry in defaults:
        for key, choice in entry.items() if isinstance(entry, dict) else ():
            group = str(key).removeprefix("override /")
            if group == key or group not in GROUPS:
                raise _wrong_defaults(file, f"{key}: {choice}", did_you_mean(group, GROUPS))
            choices[group] = str(choice)
        if not isinstance(entry, dict) and entry != "_self_":
            parents.append(str(entry))
    for group in GROUPS:
        if isinstance(choice := body.get(group), str) and "${" not in choice:
            raise _wrong_defaults(file, f"{group}: {choice}")
    return RecipeFile(file=file, parents=parents, choices=choices, body=body)


def _wrong_defaults(file: Path, written: str, guess: str = "") -> RequestError:
    return RequestError(
        f"{file}: '{written}' is not how a recipe is put together; its defaults list other recipes, such as "
        "'- quickstart', and choices of groups, such as '- override /model: qwen25_05b', and end with '- _self_'."
        f"{guess}",
        problem_id="recipe-defaults",
    )
