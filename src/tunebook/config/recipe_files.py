"""Recipe files: read, checked, and handed to Hydra as the config group `recipes`.

Recipes are in several folders, and a recipe may build on another by naming it in its defaults. Hydra's search path
allows only one folder called `recipes`, so the files are read here and stored in Hydra's ConfigStore. Errors can then
name the file of a wrong entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.config.book import book_root, find_recipes, recipe_file
from tunebook.config.schema import GROUPS
from tunebook.config.walk import schemas_of
from tunebook.errors import RequestError, did_you_mean, first_line


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """One recipe as written: its group choices (`override /group: choice`) and its own values."""

    name: str
    file: Path
    parents: tuple[str, ...]
    choices: dict[str, str]
    body: dict[str, Any]
    node: DictConfig  # the whole file, for Hydra


def group_choices(group: str) -> list[str]:
    """The choices of a config group, as a user types them."""
    return sorted(file.stem for file in (book_root() / "hydra_configs" / group).glob("*.yaml"))


def choice_schema(group: str, choice: str) -> str | None:
    """The schema of a choice with its own keys, such as `fsdp`; None if neither its file nor its parents name one."""
    body: Any = OmegaConf.to_container(OmegaConf.load(book_root() / "hydra_configs" / group / f"{choice}.yaml"))
    for entry in body.get("defaults", []):
        if str(entry).startswith(f"/schema/{group}/"):
            return str(entry).rpartition("/")[2].partition("@")[0]
        if entry != "_self_":
            return choice_schema(group, str(entry))
    return None


def load_recipes(name: str, recipes_dirs: list[Path]) -> list[RecipeFile]:
    """The recipe and those it builds on, the strongest first: of two parents Hydra takes the later one's values.

    Raises: RequestError for an unknown recipe, a name that cannot be composed, broken YAML, a circle of parents, a
    parent that is named twice, an unknown group or choice.
    """
    known = find_recipes(recipes_dirs)
    if name in known:
        _refuse_unreadable_name(name, known[name])
    chain: list[RecipeFile] = []
    waiting: list[tuple[str, Path, tuple[str, ...]]] = [(name, recipe_file(name, recipes_dirs), ())]
    while waiting:
        current, file, above = waiting.pop()
        if any(recipe.name == current for recipe in chain):
            is_circle = current in above
            how = f"itself: {' -> '.join((*above, current))}" if is_circle else f"'{current}' twice"
            raise RequestError(
                f"recipe '{name}' builds on {how}; remove '{current}' from the defaults of {known[above[-1]]}",
                problem_id="recipe-circle",
            )
        recipe = _read(current, file, set(known))
        chain.append(recipe)
        waiting += [(parent, known[parent], (*above, current)) for parent in recipe.parents]
    return chain


def _refuse_unreadable_name(name: str, file: Path) -> None:
    """Raises: RequestError for a name that Hydra's grammar does not read as the same text."""
    try:
        read: Any = OverridesParser.create().parse_override(f"recipes={name}").value()
    except HydraException:
        read = None
    if read != name or "${" in name:  # 1 and true are read as values of other types, [a] as a list
        raise RequestError(
            f"{file}: Hydra, which composes a run, does not read '{name}' as a name; rename it: letters a-z, digits, "
            "_ - . (and not a number, true, false or null alone)",
            problem_id="recipe-name-form",
        )


def store_recipes(chain: list[RecipeFile]) -> None:
    """Make the recipes known to Hydra as choices of the group `recipes`."""
    for recipe in chain:
        ConfigStore.instance().store(group="recipes", name=recipe.name, node=recipe.node, package="_global_")


def _load_yaml(file: Path) -> DictConfig:
    try:
        node = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        reason = getattr(error, "problem", None) or first_line(error)
        raise RequestError(f"{place}: this is not YAML: {reason}", problem_id="recipe-not-yaml") from error
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}", problem_id="recipe-not-yaml") from error
    if not isinstance(node, DictConfig):
        raise RequestError(f"{file}: a recipe is a mapping of keys to values", problem_id="recipe-not-yaml")
    return node


def _read(name: str, file: Path, known: set[str]) -> RecipeFile:
    node = _load_yaml(file)
    content: dict[str, Any] = OmegaConf.to_container(node, resolve=False)  # type: ignore[assignment]
    parents: list[str] = []
    choices: dict[str, str] = {}
    for entry in _default_entries(content.pop("defaults", None), file):
        if isinstance(entry, str):
            parents.append(_parent(entry, file, known))
            continue
        for key, choice in entry.items():
            group = _overridden_group(str(key), file)
            choices[group] = _choice(group, choice, file)
    body = {str(key): value for key, value in content.items()}
    _check_sections(body, file)
    return RecipeFile(name=name, file=file, parents=tuple(parents), choices=choices, body=body, node=node)


def _default_entries(defaults: object, file: Path) -> list[str | dict[Any, Any]]:
    """The entries of a recipe's defaults without `_self_`, which Hydra takes for the place of the recipe's own values.

    Raises: RequestError for anything but a list of names and mappings, and for own values that a parent would replace.
    """
    entries = [] if defaults is None else defaults
    if not isinstance(entries, list) or not all(isinstance(entry, str | dict) for entry in entries):
        raise RequestError(
            f"{file}: its defaults are {entries}, and must be a list, of which each line is the name of a recipe or a "
            "group's choice: '- quickstart', '- override /model: qwen25_05b'",
            problem_id="recipe-defaults",
        )
    after = entries[entries.index("_self_") + 1 :] if "_self_" in entries else []
    if parent := next((entry for entry in after if isinstance(entry, str)), None):
        raise RequestError(
            f"{file}: '- {parent}' stands after '- _self_' in its defaults, so it would replace the values of this "
            "file; write '- _self_' last",
            problem_id="recipe-defaults",
        )
    return [entry for entry in entries if entry != "_self_"]


def _check_sections(body: dict[str, Any], file: Path, above: str = "") -> None:
    """Raises: RequestError for a section's key written with a dot, and for a single value in place of its keys."""
    for name, value in body.items():
        key = f"{above}{name}"
        section, _, below = str(name).partition(".")
        if below and schemas_of(f"{above}{section}"):
            raise RequestError(
                f"{file}: '{key}' is written with a dot, as only overrides are; write '{below}: ...' indented below "
                f"'{section}:'",
                problem_id="unknown-key",
            )
        if not schemas_of(key) or (isinstance(value, str) and "${" in value):  # a reference to another section
            continue
        if isinstance(value, dict):
            _check_sections(value, file, f"{key}.")
        elif value is not None:
            is_choice = key in GROUPS and value in group_choices(key)
            instead = (
                f"'- override /{key}: {value}' in its defaults" if is_choice else f"its keys indented below '{name}:'"
            )
            raise RequestError(
                f"{file}: {key} is a group of keys, and the file gives it the value '{value}'; write {instead}",
                problem_id="wrong-type",
            )


def _parent(entry: str, file: Path, known: set[str]) -> str:
    if entry not in known:
        raise RequestError(
            f"{file}: builds on a recipe '{entry}' that is not there.{did_you_mean(entry, known)} "
            f"Recipes: {', '.join(sorted(known))}",
            problem_id="unknown-recipe",
        )
    return entry


def _overridden_group(key: str, file: Path) -> str:
    group = key.removeprefix("override ").strip().removeprefix("/")
    if group not in GROUPS:
        raise RequestError(
            f"{file}: there is no config group '{group}'.{did_you_mean(group, GROUPS)} Groups: {', '.join(GROUPS)}",
            problem_id="unknown-group",
        )
    if key != f"override /{group}":
        raise RequestError(
            f"{file}: write '- override /{group}: ...' instead of '- {key}: ...': the group already has a choice "
            "in hydra_configs/config.yaml, which a recipe overrides",
            problem_id="recipe-defaults",
        )
    return group


def _choice(group: str, choice: object, file: Path) -> str:
    known = group_choices(group)
    if not isinstance(choice, str) or choice not in known:
        raise RequestError(
            f"{file}: there is no {group} '{choice}'.{did_you_mean(str(choice), known)} "
            f"Choices of {group}: {', '.join(known)}",
            problem_id="unknown-choice",
        )
    return choice
