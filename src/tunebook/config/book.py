"""The book: the folder with `hydra_configs/` and `recipes/`, found from any working directory.

Looked for in this order: `$TUNEBOOK_HOME`, the checkout that this file lies in, the copy inside an installed package.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from tunebook.errors import RequestError, did_you_mean

BOOK_PREFIX = "book:"
# model.chat_template may name a template in place of a file: see model/tokenizer_files.py.
CHATML_TEMPLATE, TRAINING_TEMPLATE, LIBRARY_PREFIX = "chatml", "training", "trl:"
INSTALLED_BOOK = "_book"  # next to the code in an installed package
RECIPES_VARIABLE = "TUNEBOOK_RECIPES"
OWN_RECIPES = Path("my_recipes")  # in the working directory; not recipes/, which in a checkout is the book
YAML_SUFFIXES = (".yaml", ".yml")


@lru_cache(maxsize=1)
def book_root() -> Path:
    """The book's folder. Raises: RequestError when $TUNEBOOK_HOME is set to something else, or there is none."""
    package = Path(__file__).resolve().parent.parent
    named = os.environ.get("TUNEBOOK_HOME")
    folders = [Path(named).expanduser().resolve()] if named else [package.parent.parent, package / INSTALLED_BOOK]
    for folder in folders:
        if (folder / "hydra_configs" / "config.yaml").is_file() and (folder / "recipes").is_dir():
            return folder
    raise RequestError(
        f"there is no hydra_configs/config.yaml and recipes/ in {' or '.join(map(str, folders))}; set TUNEBOOK_HOME to "
        "a checkout of Tunebook, or unset it",
        problem_id="book-not-found",
    )


class PlacedPath(str):
    """A configured path with the folder in which it was typed, since runs are read from other folders later.

    Its text is what was typed: that is hashed, compared and printed. `copy` and `pickle` keep the folder.
    yaml.safe_dump and OmegaConf.create refuse it (pass `str(path)`), OmegaConf.structured accepts it, and
    OmegaConf.to_object returns a plain text without the folder.
    """

    typed_in: Path


def placed(text: str, typed_in: Path) -> PlacedPath:
    """A path as it was typed in a folder."""
    path = PlacedPath(text)
    path.typed_in = typed_in
    return path


def is_relative(text: str) -> bool:
    """True if a configured path depends on a folder."""
    return not is_in_book(text) and not Path(text).expanduser().is_absolute()


def is_in_book(text: str) -> bool:
    """Whether a path is written as `book:...`."""
    return text.startswith(BOOK_PREFIX)


def is_task_file(task: str) -> bool:
    """Whether `task` is a file rather than a name: `book:...`, or ends like YAML."""
    return is_in_book(task) or task.endswith(YAML_SUFFIXES)


def resolve_path(text: str) -> Path:
    """The absolute path of a configured one: `book:...` is inside the book, others start where they were typed.

    That is the working directory, or for an earlier run the folder in its run.yaml.
    """
    if is_in_book(text):
        return book_root() / text.removeprefix(BOOK_PREFIX)
    path = Path(text).expanduser()
    return text.typed_in / path if isinstance(text, PlacedPath) else path.absolute()


def users_folders(named: list[Path]) -> list[Path]:
    """The user's folders of recipes, as typed: `--recipes-dir`, $TUNEBOOK_RECIPES, and my_recipes if there is one."""
    in_variable = [Path(part) for part in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep) if part]
    return [*named, *in_variable, *([OWN_RECIPES] if OWN_RECIPES.is_dir() else [])]


def recipe_folders(named: list[Path]) -> list[Path]:
    """The folders recipes are looked up in: the user's, then the book's.

    Raises: RequestError for one that does not exist.
    """
    folders = []
    for folder in users_folders(named):
        absolute = folder.expanduser().absolute()
        if not absolute.is_dir():
            where = f"--recipes-dir {folder}" if folder in named else f"{RECIPES_VARIABLE}={folder}"
            raise RequestError(
                f"{where}: {absolute} is no folder; name one that holds your <recipe>.yaml files",
                problem_id="recipes-dir-not-found",
            )
        folders.append(absolute)
    return [*folders, book_root() / "recipes"]


def find_recipes(named: list[Path]) -> dict[str, Path]:
    """Every recipe by name and its file, in alphabetical order.

    Raises: RequestError when two folders hold a recipe of the same name, since one would hide the other.
    """
    recipes: dict[str, Path] = {}
    for folder in dict.fromkeys(recipe_folders(named)):
        for file in sorted(folder.glob("*.yaml")):
            if file.stem in recipes:
                raise RequestError(
                    f"two recipes are called '{file.stem}': {recipes[file.stem]} and {file}; rename one",
                    problem_id="recipe-name-taken",
                )
            recipes[file.stem] = file
    return dict(sorted(recipes.items()))


def recipe_name(recipe: str) -> str:
    """The name of a recipe that may have been named as a YAML file."""
    return Path(recipe).stem if recipe.endswith(YAML_SUFFIXES) else recipe


def recipe_file(name: str, named: list[Path]) -> Path:
    """The file of one recipe, which is named by its name or as a YAML file. Raises: RequestError for an unknown one."""
    if name.endswith(YAML_SUFFIXES):
        file = resolve_path(name)
        if file.is_file():
            return file
        raise RequestError(f"there is no recipe {file}; `tunebook list` shows the recipes", problem_id="unknown-recipe")
    recipes = find_recipes(named)
    if name not in recipes:
        hub = f" For a model type model={name}, for data of the hub dataset=hub dataset.name={name}."
        hint = did_you_mean(name, recipes) or (hub if "/" in name else "")
        raise RequestError(
            f"'{name}' is no recipe and no file or folder of data.{hint} `tunebook list` shows the recipes, and "
            "--recipes-dir FOLDER adds yours",
            problem_id="unknown-recipe",
        )
    return recipes[name]
