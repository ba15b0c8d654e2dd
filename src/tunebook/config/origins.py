"""Where a value came from: an override, a recipe's file, a group's file, or the schema's default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from tunebook.config.book import book_root
from tunebook.config.override_text import as_typed
from tunebook.config.recipe_files import RecipeFile
from tunebook.config.schema import GROUPS
from tunebook.config.unsafe_text import shown


def _contains(body: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(body, dict) or part not in body:
            return False
        body = body[part]
    return True


def _states(override: Override, key: str) -> bool:
    """Whether the override of a section sets a key below it. Hydra merges a dictionary and keeps its other keys."""
    value: Any = override.value()
    below = key.removeprefix(f"{override.key_or_group}.").split(".")
    return not isinstance(value, dict) or _contains({str(name): one for name, one in value.items()}, below)


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The inputs of a composition: recipe files (strongest first), overrides, and group choices."""

    recipes: list[RecipeFile]
    overrides: list[Override]
    groups: dict[str, str]

    def override(self, key: str) -> Override | None:
        """The override that set a dotted key, a section that contains it, or a key below it."""
        for override in reversed(self.overrides):
            name = override.key_or_group
            if name in GROUPS and not isinstance(override.value(), dict):
                continue
            if key == name or name.startswith(f"{key}.") or (key.startswith(f"{name}.") and _states(override, key)):
                return override
        return None

    def value(self, key: str) -> str | None:
        """The value of a dotted key as text, as typed or from a recipe; None if neither sets it."""
        override = self.override(key)
        if override is not None:
            is_of_a_section = not override.key_or_group.startswith(key)  # the value has all keys of the section
            return None if is_of_a_section else (override.input_line or "").partition("=")[2]
        for recipe in self.recipes:
            if _contains(recipe.body, key.split(".")):
                body: Any = recipe.body
                for part in key.split("."):
                    body = body[part]
                return as_typed(body)
        return None

    def of(self, key: str) -> str:
        """The override, file or default that set a dotted key, in words."""
        override = self.override(key)
        if override is not None:
            return f"override '{shown(override.input_line or '')}'"
        if (file := self.file(key)) is not None:
            return str(file)
        group = key.partition(".")[0]
        return f"the default of {group}={self.groups[group]}" if group in self.groups else "the schema's default"

    def file(self, key: str) -> Path | None:
        """The file that sets a dotted key unless an override does: a recipe's, config.yaml, a group's; or None."""
        for recipe in self.recipes:
            if _contains(recipe.body, key.split(".")):
                return recipe.file
        config_file = book_root() / "hydra_configs" / "config.yaml"
        if _contains(_content(str(config_file)), key.split(".")):
            return config_file
        group, *rest = key.split(".")
        return _group_file(group, self.groups[group], rest) if group in self.groups else None

    def set_by(self, key: str) -> str | None:
        """The override or recipe that set a dotted key, directly or by choosing a group's file; None for a default."""
        group, _, rest = key.partition(".")
        if self.override(key) is None and not any(_contains(recipe.body, key.split(".")) for recipe in self.recipes):
            file = book_root() / "hydra_configs" / group / f"{self.groups.get(group)}.yaml"
            if not rest or not file.is_file() or not _contains(_content(str(file)), rest.split(".")):
                return None
            place = self.of_choice(group)
        else:
            place = self.of(key)
        return None if place == str(book_root() / "hydra_configs" / "config.yaml") else place

    def of_choice(self, group: str) -> str:
        """The override or file that chose a group's file."""
        for override in reversed(self.overrides):
            if override.key_or_group == group:
                return f"override '{override.input_line}'"
        for recipe in self.recipes:
            if group in recipe.choices:
                return str(recipe.file)
        return str(book_root() / "hydra_configs" / "config.yaml")

    def choice(self, group: str) -> str:
        """The name of a group's chosen file, also if composing failed before Hydra knew it."""
        if group in self.groups:
            return self.groups[group]
        for override in reversed(self.overrides):
            if override.key_or_group == group:
                return str(override.value())
        for recipe in self.recipes:
            if group in recipe.choices:
                return recipe.choices[group]
        defaults = _content(str(book_root() / "hydra_configs" / "config.yaml"))["defaults"]
        return str(next(entry[group] for entry in defaults if isinstance(entry, dict) and group in entry))


def _group_file(group: str, choice: str, parts: list[str]) -> Path | None:
    """The file that sets a key of a group: the choice's own, or one that it builds on."""
    file = book_root() / "hydra_configs" / group / f"{choice}.yaml"
    content = _content(str(file))
    if _contains(content, parts):
        return file
    parents = [entry for entry in content.get("defaults", []) if entry != "_self_" and not str(entry).startswith("/")]
    found = (_group_file(group, str(parent), parts) for parent in reversed(parents))
    return next((file for file in found if file is not None), None)


def _content(file: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
