"""Turns errors of Hydra and OmegaConf into messages with a fix.

Each message names the key, its file or override, the allowed values and the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import re

from tunebook.config.foreign import instead_of
from tunebook.config.interpolation import outside_error
from tunebook.config.origins import Origins
from tunebook.config.override_text import shell_word, typed
from tunebook.config.recipe_files import choice_schema, group_choices
from tunebook.config.schema import CHOICE_SCHEMAS, GROUPS
from tunebook.config.unsafe_text import without_secrets
from tunebook.config.walk import all_keys, describe_type, field_types, mapping_type, schemas_of
from tunebook.errors import RequestError, did_you_mean, first_line, nearest


class OverrideError(RequestError):
    """A wrong override; `word` is the override as it was typed."""

    def __init__(self, word: str, message: str, *, problem_id: str) -> None:
        super().__init__(message, problem_id=problem_id)
        self.word = word


def all_of(errors: list[RequestError]) -> RequestError:
    """Several errors as one numbered list; a single error unchanged."""
    if len(errors) == 1:
        return errors[0]
    lines = [f"  {number}. {error.message}   [{error.problem_id}]" for number, error in enumerate(errors, 1)]
    return RequestError("\n".join([f"{len(errors)} problems", *lines]), problem_id=errors[0].problem_id)


def _wrong(key: str, message: str, origins: Origins, *, problem_id: str) -> RequestError:
    """An error about a key, with the file or override that set it."""
    override = origins.override(key)
    if override is None:
        return RequestError(f"{origins.of(key)}: {message}", problem_id=problem_id)
    word = override.input_line or ""
    return OverrideError(word, f"override '{word}': {message}", problem_id=problem_id)


def unreadable_override(text: str) -> OverrideError:
    """The error for an override that Hydra's grammar does not accept."""
    key, has_value, _ = text.partition("=")
    if key and has_value:
        message = f"override '{text}' cannot be read; its brackets or quotes do not match, or an entry needs quotes"
    else:
        message = f"'{text}' is no override: write key=value, without spaces round the ={instead_of(key)}"
    return OverrideError(text, message, problem_id="override-form")


def added_or_removed(text: str) -> OverrideError:
    """The error for an override with which Hydra would add or remove a key."""
    word = text.lstrip("+~")
    key, has_value, value = word.partition("=")
    instead = instead_of(key, value) or f"; type {shell_word(word if has_value else f'{key}=VALUE')}"
    message = f"override '{text}': keys can be set, not added or removed{instead}"
    return OverrideError(text, message, problem_id="override-form")


def several_values(key: str, text: str) -> OverrideError:
    """The error for an override with several values, as for a sweep, or for a list under another tool's key."""
    value = text.partition("=")[2]
    instead = (key not in all_keys() and instead_of(key, value)) or (
        f"; try `tunebook sweep` for one run each, {shell_word(f'{key}=[{value}]')} for a list, or {typed(key, value)} "
        "for a text"
    )
    message = f"override '{text}' lists several values, and this command runs one{instead}"
    return OverrideError(text, message, problem_id="override-form")


def unknown_choice(group: str, choice: str, place: str, *, word: str | None = None) -> RequestError:
    """The error for a choice that a group does not have; `word` is the override that asked for it."""
    known = group_choices(group)
    hint = f"{instead_of(group, choice)}.{did_you_mean(choice, known)}"
    message = f"{place}: there is no {group} '{choice}'{hint} Choices of {group}: {', '.join(known)}"
    if word is not None:
        return OverrideError(word, message, problem_id="unknown-choice")
    return RequestError(message, problem_id="unknown-choice")


def unknown_key(key: str, owner: type | None, origins: Origins) -> RequestError:
    """The error for a key that the schema does not have: another tool's name, or a misspelling."""
    override = origins.override(key)
    asked = override.key_or_group if override is not None and override.key_or_group.startswith(key) else key
    if asked not in all_keys() and (instead := instead_of(asked, origins.value(key))):
        return _wrong(key, f"there is no key '{asked}'{instead}", origins, problem_id="unknown-key")
    parent, _, name = key.rpartition(".")
    if elsewhere := _other_choices(parent, name, owner):
        group = parent.split(".")[0]
        message = f"{key} has no meaning with {group}={origins.choice(group)}; it belongs to {', '.join(elsewhere)}"
        return _wrong(key, message, origins, problem_id="unknown-key")
    siblings = list(field_types(owner)) if dataclasses.is_dataclass(owner) else []
    siblings = siblings or [field for schema in schemas_of(parent) for field in field_types(schema)]
    near = nearest(name, siblings)
    guess = f" Did you mean '{key.removesuffix(name)}{near}'?" if near else did_you_mean(key, all_keys() | set(GROUPS))
    allowed = f" Keys of {parent or 'a run'}: {', '.join(dict.fromkeys(siblings))}" if siblings else ""
    return _wrong(key, f"there is no key '{key}'.{guess}{allowed}", origins, problem_id="unknown-key")


def _other_choices(parent: str, name: str, owner: type | None) -> list[str]:
    """The choices of the same group whose schema has the key."""
    found: list[str] = []
    for place, schema in CHOICE_SCHEMAS.items():
        group, kind = place.split("/")
        if group == parent and schema is not owner and name in field_types(schema):
            found += [f"{group}={choice}" for choice in group_choices(group) if choice_schema(group, choice) == kind]
    return found


def explain_missing(missing: list[str]) -> RequestError:
    """The error for missing required values."""
    lines = [f"  {key}=VALUE ({type_of(key)})" for key in missing]
    return RequestError("these values are required:\n" + "\n".join(lines), problem_id="missing-value")


def type_of(key: str) -> str:
    """The values that a user may type for a dotted key, in words."""
    parent, _, name = key.rpartition(".")
    for schema in schemas_of(parent):
        if name in field_types(schema):
            return describe_type(field_types(schema)[name])
    annotation = mapping_type(key)
    return "a value" if annotation is None else describe_type(annotation)


def explain_composition(error: BaseException, origins: Origins) -> RequestError:
    """The error for any exception raised while composing."""
    missing_file = getattr(error, "missing_cfg_file", None)
    if missing_file:
        group, _, choice = str(missing_file).rpartition("/")
        return unknown_choice(group, choice, origins.of_choice(group))
    if isinstance(error, AssertionError):
        # OmegaConf asserts on a key below a group that is null: only model.facts can be.
        key = next(name for name in (o.key_or_group for o in origins.overrides) if name.startswith("model.facts."))
        message = f"model={origins.choice('model')} takes its facts from the model's config.json; correct them there"
        return _wrong(key, message, origins, problem_id="unknown-key")
    return explain_value(error, origins)


def explain_value(error: BaseException, origins: Origins) -> RequestError:
    """The error for a key or value that the schema refuses."""
    cause = next((e for e in (error, error.__cause__, error.__context__) if getattr(e, "full_key", None)), error)
    named = re.search(r"full_key: (\S+)", str(error))  # in an error that is not OmegaConf's own
    if cause is error and not getattr(error, "full_key", None) and named is None:
        return RequestError(first_line(error), problem_id="cannot-compose")
    key = str(getattr(cause, "full_key", None) or (named and named[1]))
    if (outside := outside_error(error)) is not None:
        message = f"{key} {outside.message}; type {outside.advice.replace('{key}', key)}"
        return _wrong(key, message, origins, problem_id=outside.problem_id)
    message = str(getattr(cause, "msg", None) or cause).splitlines()[0]
    if "not in" in message and "Key" in message:
        return unknown_key(key, getattr(cause, "object_type", None), origins)
    if missing := re.search(r"Interpolation key '(.*?)' not found", message):
        message = f"{key} takes its value from '{missing[1]}', which is no key.{did_you_mean(missing[1], all_keys())}"
        return _wrong(key, message, origins, problem_id="wrong-type")
    return wrong_type(key, origins, message)


def wrong_type(key: str, origins: Origins, said: str = "") -> RequestError:
    """The error for a value of another type than its key has; `said` is the message of OmegaConf."""
    override = origins.override(key)
    value: str | None = None
    if override is not None and override.key_or_group == key:
        value = (override.input_line or "").partition("=")[2]
    elif found := re.search(r"[Vv]alue '(.*?)'", said) or re.search(r"value: (.*)", said):
        value = found[1]
    described = type_of(key)
    if value is None:
        return _wrong(key, f"{key} must be {described}", origins, problem_id="wrong-type")
    guess = ""
    if described.startswith("one of "):
        guess = "." + did_you_mean(value, described.removeprefix("one of ").removesuffix(" or null").split(", "))
    elif described.startswith("a list") and not value.startswith("["):
        guess = f"; type {shell_word(f'{key}=[{value}]')}"
    return _wrong(key, f"{key}={value} is not {described}{guess}", origins, problem_id="wrong-type")


def secret_in_configuration(key: str, found: str, origins: Origins) -> RequestError:
    """The error for a text that contains a secret. The message does not repeat it."""
    place = without_secrets(origins.of(key)) if key != "launcher.env_vars" else "launcher.env_vars"
    return RequestError(
        f"{place}: {key} holds {found}, and a configuration is written to run.yaml, manifest.json and the report. "
        "Leave it out: HF_TOKEN and WANDB_API_KEY reach the ranks by themselves; set others on the machines of the run",
        problem_id="secret-in-configuration",
    )
