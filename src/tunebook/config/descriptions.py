"""What each setting means, read from the schema: the comments at its field, its default, its values and its unit."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from enum import EnumMeta
from functools import cache
from typing import Any

from omegaconf import MISSING

from tunebook.config.book import book_root
from tunebook.config.compose import compose
from tunebook.config.identity import default_of, flat, plain
from tunebook.config.keys import PART, Setting, all_keys, keys_with_owners
from tunebook.config.override_text import as_typed
from tunebook.config.ranges import limits_text
from tunebook.config.recipe_files import group_choices
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS

_COMMENT = re.compile(r" {4}# (.*)")
_FIELD = re.compile(r" {4}(\w+): [^#]+(?:# (.*))?")
_KINDS = {bool: "true, false", int: "whole number", float: "number", str: "text", list: "[a,b]"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """One setting."""

    key: str
    meaning: str
    default: str  # of a run without a recipe
    values: str
    choices: tuple[str, ...]  # those of its group that have this setting; empty: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A group, or a part of one such as `dataset.synthetic`, with its settings."""

    name: str
    meaning: str
    choices: dict[str, str]  # of a group, each with the first sentence of its file
    settings: list[Description]


@cache
def sections() -> dict[str, Section]:
    """Every section of a run's configuration by its dotted key; the empty key is the run itself."""
    composed = dict(flat(plain(compose(None, []).config)))
    found: dict[str, Section] = {}
    seen: set[tuple[str, int]] = set()  # choices of a group share settings
    for owner, key, setting in keys_with_owners():
        of_a_data_set = key.replace(f".parts.{PART}", "")
        if (key, id(setting)) in seen or key == "recipe" or (key != of_a_data_set and of_a_data_set in all_keys()):
            continue
        seen.add((key, id(setting)))
        name = key.rpartition(".")[0]
        if name not in found:
            found[name] = Section(name=name, meaning=_summary(owner), choices=_choices(name), settings=[])
        if not dataclasses.is_dataclass(typing.get_type_hints(owner)[setting.name]):
            found[name].settings.append(_describe(owner, key, setting, composed))
    return found


def _describe(owner: type, key: str, setting: Setting, composed: dict[str, Any]) -> Description:
    schemas = CHOICE_SCHEMAS.get(key.partition(".")[0], {})
    having = tuple(choice for choice, schema in schemas.items() if setting in dataclasses.fields(schema))
    default = composed.get(key, default_of(key))
    kind = typing.get_type_hints(owner)[setting.name]
    return Description(
        key=key,
        meaning=_comments(owner).get(setting.name) or (_summary(kind) if isinstance(kind, EnumMeta) else ""),
        default="required" if default == MISSING else as_typed(default) or "''",
        values=_values(kind, setting),
        choices=having if len(having) < len(schemas) else (),
    )


def _without_null(kind: Any) -> Any:
    """The type of a setting's other values, of `int | None` this is `int`."""
    return typing.get_args(kind)[0] if _has_null(kind) else kind


def _has_null(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) and type(None) in typing.get_args(kind)


def _values(kind: Any, setting: Setting) -> str:
    value = _without_null(kind)
    entry = (typing.get_args(value) or (value,))[0]
    if isinstance(entry, EnumMeta):
        text = ("any of " if entry is not value else "") + ", ".join(entry.__members__)
    else:
        text = _KINDS.get(typing.get_origin(value) or value, "{name: value}")
    limited = " ".join(filter(None, [text, limits_text(setting), setting.metadata.get("unit", "")]))
    return f"{limited}, null" if _has_null(kind) else limited


def _capitalized(comment: str) -> str:
    """A comment with a capital, unless it begins with a value such as `zero3:` or `model/`."""
    return comment[:1].upper() + comment[1:] if re.match(r"[a-z-]+[ ,;]", comment) else comment


@cache
def _comments(owner: type) -> dict[str, str]:
    """The comments above and beside each field of a dataclass and of those that it extends."""
    comments: dict[str, str] = {}
    for schema in (each for each in owner.__mro__ if dataclasses.is_dataclass(each)):
        above: list[str] = []
        for line in inspect.getsource(schema).splitlines():
            if match := _COMMENT.fullmatch(line):
                above.append(match[1])
            elif match := _FIELD.fullmatch(line):
                comment = " ".join([*above, *filter(None, [match[2]])])
                if comment:
                    comments.setdefault(match[1], _capitalized(comment))
                above = []
    return comments


def _summary(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def _choices(group: str) -> dict[str, str]:
    choices = group_choices(group) if group in GROUPS else []
    files = {choice: book_root() / "hydra_configs" / group / f"{choice}.yaml" for choice in choices}
    return {choice: _first_sentence(file.read_text(encoding="utf-8")) for choice, file in files.items()}


def _first_sentence(text: str) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = text.removeprefix("# @package _global_\n").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".")
