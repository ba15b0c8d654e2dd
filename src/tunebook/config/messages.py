"""Turns what Hydra and OmegaConf say of a wrong configuration into one message a user can act on.

Each message names the key, the file or override it came from, the allowed values and the nearest spelling.
"""

from __future__ import annotations

import re

from tunebook.config.origins import Origins
from tunebook.config.recipe_files import group_choices
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS
from tunebook.config.walk import all_keys, describe_type, field_types, schemas_of
from tunebook.errors import RequestError, did_you_mean, nearest

# What to type for values that only the user can know.
_MISSING_HINTS = {
    "model.name": "model.name=organisation/name, or model.path=DIR",
    "dataset.path": "dataset.path=FILE_OR_GLOB",
    "parallelism.strategy": "parallelism=single",
}


def unreadable_override(text: str) -> RequestError:
    """An override that Hydra's grammar does not take."""
    if "=" not in text:
        key = nearest(text, all_keys())
        hint = f"; did you mean '{key}=VALUE'?" if key else ""
        return RequestError(
            f"'{text}' is no override: write key=value{hint} (a recipe's name comes first)", problem_id="override-form"
        )
    key, value = text.split("=", 1)
    return RequestError(
        f"override '{text}' cannot be read; put quotes round a value with special characters: \"{key}='{value}'\"",
        problem_id="override-form",
    )


def unknown_choice(group: str, choice: str, place: str) -> RequestError:
    """A group has no such file."""
    known = group_choices(group)
    return RequestError(
        f"{place}: there is no {group} '{choice}'.{did_you_mean(choice, known)} Choices of {group}: {', '.join(known)}",
        problem_id="unknown-choice",
    )


def unknown_key(key: str, owner: type | None, origins: Origins) -> RequestError:
    """A key that the schema at its place does not have."""
    parent, _, name = key.rpartition(".")
    place = origins.of(key)
    elsewhere = _other_choices(parent, name, owner)
    if elsewhere:
        group = parent.split(".")[0]
        return RequestError(
            f"{place}: {key} has no meaning with {group}={origins.choice(group)}; it belongs to {', '.join(elsewhere)}",
            problem_id="unknown-key",
        )
    siblings = list(field_types(owner)) if owner is not None else []
    siblings = siblings or [field for schema in schemas_of(parent) for field in field_types(schema)]
    guess = did_you_mean(name, siblings) or _guess_elsewhere(key)
    allowed = f" Keys of {parent or 'a run'}: {', '.join(dict.fromkeys(siblings))}" if siblings else ""
    return RequestError(f"{place}: there is no key '{key}'.{guess}{allowed}", problem_id="unknown-key")


def _guess_elsewhere(key: str) -> str:
    """A key of another group: the same last word, or a near spelling of the whole."""
    keys = all_keys()
    same_word = sorted(
        (known for known in keys if known.split(".")[-1] == key.split(".")[-1]), key=lambda k: k.count(".")
    )
    full = same_word[0] if same_word else nearest(key, keys | set(GROUPS))
    return f" Did you mean '{full}'?" if full else ""


def _other_choices(parent: str, name: str, owner: type | None) -> list[str]:
    """The choices of the same group whose schema does have the key."""
    found: list[str] = []
    for place, schema in CHOICE_SCHEMAS.items():
        group, kind = place.split("/")
        if group == parent and schema is not owner and name in field_types(schema):
            found += [f"{group}={choice}" for choice in group_choices(group) if choice.startswith(kind.rstrip("s"))]
            found = found or [f"{group}={kind}"]
    return found


def explain_missing(missing: list[str]) -> RequestError:
    """Values that nobody gave."""
    lines = [f"  {key}: type {_MISSING_HINTS.get(key, f'{key}=VALUE')} ({_type_of(key)})" for key in missing]
    return RequestError("these values must be said:\n" + "\n".join(lines), problem_id="missing-value")


def _type_of(key: str) -> str:
    parent, _, name = key.rpartition(".")
    for schema in schemas_of(parent):
        if name in field_types(schema):
            return describe_type(field_types(schema)[name])
    return "a value"


def explain_composition(error: BaseException, origins: Origins) -> RequestError:
    """Any error of composing, by its kind."""
    missing_file = getattr(error, "missing_cfg_file", None)
    if missing_file:
        group, _, choice = str(missing_file).rpartition("/")
        return unknown_choice(group, choice, origins.of_choice(group))
    if isinstance(error, AssertionError):
        # OmegaConf asserts on a key below a group that is null.
        keys = [override.key_or_group for override in origins.overrides if override.key_or_group.count(".") > 1]
        return RequestError(f"{', '.join(keys)}: the group above this key is null", problem_id="unknown-key")
    return explain_value(error, origins)


def explain_value(error: BaseException, origins: Origins) -> RequestError:
    """A key or value that the schema refuses."""
    cause = next((e for e in (error, error.__cause__, error.__context__) if getattr(e, "full_key", None)), None)
    if cause is None:
        return RequestError(str(error).splitlines()[0], problem_id="cannot-compose")
    key = str(cause.full_key)  # type: ignore[attr-defined]
    message = str(getattr(cause, "msg", None) or cause).splitlines()[0]
    if "not in" in message and "Key" in message:
        return unknown_key(key, getattr(cause, "object_type", None), origins)
    found = re.search(r"[Vv]alue '(.*?)'", message) or re.search(r"value: (.*)", message)
    value = found.group(1) if found else None
    said = f"{key}={value}" if value is not None else key
    return RequestError(
        f"{origins.of(key)}: {said} is not {_type_of(key)}{_near_value(key, value)}", problem_id="wrong-type"
    )


def _near_value(key: str, value: str | None) -> str:
    described = _type_of(key)
    if value is None or not described.startswith("one of "):
        return "" if value is not None else " and cannot be composed"
    guess = did_you_mean(value, described.removeprefix("one of ").removesuffix(" or null").split(", "))
    return f".{guess}" if guess else ""
