"""Walks over the schema, composed trees and configurations: keys, their types, texts and unknown keys."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tunebook.config.schema import CHOICE_SCHEMAS, RunConfig


@cache  # type hints are evaluated from text, and a plan composes up to ten configurations
def field_types(schema: type) -> Mapping[str, Any]:
    """The fields of a dataclass and their annotations."""
    hints = typing.get_type_hints(schema)
    settings = (field for field in dataclasses.fields(schema) if not field.metadata.get("omegaconf_ignore"))
    return MappingProxyType({field.name: hints[field.name] for field in settings})


def without_none(annotation: Any) -> Any:
    """`X` for `X | None`; anything else unchanged."""
    if isinstance(annotation, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return members[0] if len(members) == 1 else annotation
    return annotation


def describe_type(annotation: Any) -> str:
    """What a user may type for a field, in words."""
    inner = without_none(annotation)
    optional = " or null" if inner is not annotation else ""
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "one of " + ", ".join(member.name for member in inner) + optional
    if isinstance(inner, type) and dataclasses.is_dataclass(inner):
        return "a group of keys: " + ", ".join(field_types(inner)) + optional
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if inner in words:
        return words[inner] + optional
    if inner is Any:
        return "any value" + optional
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is list:
        return f"a list such as [a,b], each {describe_type(arguments[0])}" + optional
    if origin is dict:
        return f"a mapping of names to {describe_type(arguments[1])}" + optional
    return str(inner) + optional


def is_in_mapping(key: str) -> bool:
    """Whether a dotted key is a mapping whose names the user chooses, such as `dataset.parts`, or lies in one."""
    parts = key.split(".")
    return any(_mapping_at(".".join(parts[: end + 1])) is not None for end in range(len(parts)))


def mapping_type(key: str) -> Any:
    """The annotation of a mapping whose names the user chooses, or of a value in it; None for any other key."""
    mapping, above = _mapping_at(key), _mapping_at(key.rpartition(".")[0])
    return mapping if mapping is not None or above is None else typing.get_args(above)[1]


def _mapping_at(key: str) -> Any:
    parent, _, name = key.rpartition(".")
    annotations = [without_none(field_types(schema).get(name)) for schema in schemas_of(parent)]
    return next((each for each in annotations if typing.get_origin(each) is dict), None)


def schemas_of(key: str) -> list[type]:
    """The possible dataclasses at a dotted key: several if choices of a group have their own schemas."""
    schemas: list[type] = [RunConfig]
    path: list[str] = []
    for part in filter(None, key.split(".")):
        path.append(part)
        nested: list[type] = []
        for schema in schemas:
            annotation = without_none(field_types(schema).get(part)) if schema is not dict else None
            if typing.get_origin(annotation) is dict:
                annotation = typing.get_args(annotation)[1]
                is_below = len(key.split(".")) > len(path) and dataclasses.is_dataclass(annotation)
                return [annotation] if is_below else []  # else a dictionary of plain values
            if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
                nested.append(annotation)
        if len(path) == 1:
            nested += [schema for place, schema in CHOICE_SCHEMAS.items() if place.startswith(f"{part}/")]
        schemas = nested
    return schemas


def keys_under(prefix: str, node: type) -> Iterator[str]:
    """Every dotted key below a dataclass, nested groups included."""
    for name, annotation in field_types(node).items():
        key = f"{prefix}.{name}" if prefix else name
        yield key
        inner = without_none(annotation)
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            for schema in schemas_of(key) or [inner]:
                yield from keys_under(key, schema)


@cache
def all_keys() -> frozenset[str]:
    """Every dotted key of a run's configuration, over all choices of all groups."""
    return frozenset(keys_under("", RunConfig))


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, list[str], bool]]:
    """Every text of a configuration, also names of entries: its key, the text or texts, and True for a list."""
    if isinstance(value, str):
        yield key, [value], False
    elif isinstance(value, list):
        yield key, [item for item in value if isinstance(item, str)], True
        for item in value:
            if not isinstance(item, str):  # of a dictionary of plain values
                yield from texts_of(item, key)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield key, [str(name)], False
            yield from texts_of(entry, f"{key}.{name}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from texts_of(getattr(value, field.name, None), f"{key}.{field.name}" if key else field.name)


def unknown_keys(tree: DictConfig, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Keys of a composed tree that its schema does not have, with the dataclass that they are in.

    Hydra accepts unknown keys in a structured config in a few ways, such as `+x`.
    """
    schema = OmegaConf.get_type(tree)
    known = field_types(schema) if schema is not None and dataclasses.is_dataclass(schema) else None
    for name in tree:
        key = f"{prefix}.{name!s}" if prefix else str(name)
        if known is not None and name not in known:
            assert schema is not None
            yield key, schema
        elif isinstance(child := tree._get_node(name), DictConfig) and not child._is_none():
            yield from unknown_keys(child, key)
