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
from tunebook.config.walk import all_keys, describe_type, field_types, is_in_mapping, mapping_type, schemas_of
from tunebook.errors import RequestError, did_you_mean, first_line, nearest

# Examples for values that only the user can give.
_MISSING_HINTS = {
    "model.name": "model.name=organization/name, or model.path=DIR",
    "dataset.path": "dataset.path=FILE_OR_GLOB",
    "parallelism.strategy": "parallelism=auto",
    "evaluation.tasks": "'evaluation.tasks=[TASK]', by name in lm-evaluation-harness or as a YAML file",
}
_LONGEST_VALUE = 200  # characters that a message repeats


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
    if not has_value:
        near = nearest(text, all_keys())
        hint = f"; did you mean '{near}=VALUE'?" if near else ""
        message = f"'{text}' is no override: write key=value{hint} (a recipe's name comes first)"
        if near != text and (instead := instead_of(text)):
            message = f"'{text}' is no override, which is written key=value, and no key{instead}"
    elif not key:
        message = f"'{text}' has no key before it: write key=value, without spaces round the ="
    else:
        message = f"override '{text}' cannot be read; its brackets or quotes do not match, or an entry needs quotes"
    return OverrideError(text, message, problem_id="override-form")


def added_or_removed(text: str) -> OverrideError:
    """The error for an override with which Hydra would add or remove a key."""
    word = text.lstrip("+~")
    key, has_value, value = word.partition("=")
    if not _is_known(key):
        return _unknown_override(text, key, value)
    message = f"override '{text}': keys can be set, not added or removed; type {shell_word(word)} instead" + (
        "" if has_value else ", with '=' and a value (null for none)"
    )
    return OverrideError(text, message, problem_id="override-form")


def _is_known(key: str) -> bool:
    return key in GROUPS or key in all_keys() or is_in_mapping(key)


def _unknown_override(text: str, key: str, value: str) -> OverrideError:
    """The error for an override of a key that there is not, in a form that is not composed."""
    hint = instead_of(key, value) or f".{_guess_elsewhere(key)}"
    return OverrideError(text, f"override '{text}': there is no key '{key}'{hint}", problem_id="unknown-key")


def several_values(key: str, text: str) -> OverrideError:
    """The error for an override with several values, as for a sweep, or for a list under another tool's key."""
    value = text.split("=", 1)[1]
    if not _is_known(key):
        return _unknown_override(text, key, value)
    described = type_of(key)
    instead = ""
    if described.startswith("a list"):
        instead = f", or {shell_word(f'{key}=[{value}]')} for a list"
    elif described.startswith("text"):
        instead = f", or {typed(key, value)} for this text"
    return OverrideError(
        text,
        f"override '{text}' lists several values, and this command runs one; try `tunebook sweep` for one run each"
        + instead,
        problem_id="override-form",
    )


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
    elsewhere = _other_choices(parent, name, owner)
    if elsewhere:
        group = parent.split(".")[0]
        choice = origins.choice(group)
        instead = ", which leaves the strategy open; name one it belongs to:" if choice == "auto" else "; it belongs to"
        message = f"{key} has no meaning with {group}={choice}{instead} {', '.join(elsewhere)}"
        return _wrong(key, message, origins, problem_id="unknown-key")
    siblings = list(field_types(owner)) if dataclasses.is_dataclass(owner) else []
    siblings = siblings or [field for schema in schemas_of(parent) for field in field_types(schema)]
    guess = _near_key(key, parent, siblings, origins) or _guess_elsewhere(key)
    allowed = f" Keys of {parent or 'a run'}: {', '.join(dict.fromkeys(siblings))}" if siblings else ""
    return _wrong(key, f"there is no key '{key}'.{guess}{allowed}", origins, problem_id="unknown-key")


def _near_key(key: str, parent: str, siblings: list[str], origins: Origins) -> str:
    """A suggestion of the full key, including what follows the misspelt part in an override."""
    near = nearest(key.rpartition(".")[2], siblings)
    if near is None:
        return ""
    instead = f"{parent}.{near}" if parent else near
    override = origins.override(key)
    if override is not None and override.key_or_group.startswith(f"{key}."):
        instead += override.key_or_group.removeprefix(key)
    return f" Did you mean '{instead}'?"


def _guess_elsewhere(key: str) -> str:
    """A suggestion of a key elsewhere: with the same last part, or with a similar spelling."""
    keys = all_keys()
    same_word = sorted(
        (known for known in keys if known.split(".")[-1] == key.split(".")[-1]), key=lambda k: k.count(".")
    )
    full = same_word[0] if same_word else nearest(key, keys | set(GROUPS))
    return f" Did you mean '{full}'?" if full else ""


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
    lines = [f"  {key}: type {_MISSING_HINTS.get(key, f'{key}=VALUE')} ({type_of(key)})" for key in missing]
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
        message = (
            f"model.facts is null with model={origins.choice('model')}, which has its sizes read from the model's "
            "config.json; correct them there, or choose a model with facts in hydra_configs/model"
        )
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
        return _wrong(key, _no_such_reference(key, missing.group(1), origins), origins, problem_id="wrong-type")
    override = origins.override(key)
    if override is not None and override.key_or_group.startswith(f"{key}."):
        message = f"{key} is {type_of(key)}, with no keys below it; type {key}=VALUE"
        return _wrong(key, message, origins, problem_id="unknown-key")
    if override is not None and override.key_or_group == key:
        value: str | None = (override.input_line or "").partition("=")[2]
    else:
        found = re.search(r"[Vv]alue '(.*?)'", message) or re.search(r"value: (.*)", message)
        value = found.group(1) if found else None
    start = f"{key}={_shortened(value)} is not" if value is not None else f"{key} must be"
    return _wrong(key, f"{start} {type_of(key)}{_near_value(key, value)}", origins, problem_id="wrong-type")


def wrong_type(key: str, origins: Origins) -> RequestError:
    """The error for an override of another form than its key has."""
    override = origins.override(key)
    value = (override.input_line or "").partition("=")[2] if override is not None else ""
    return _wrong(key, f"{key}={_shortened(value)} is not {type_of(key)}", origins, problem_id="wrong-type")


def secret_in_configuration(key: str, found: str, origins: Origins) -> RequestError:
    """The error for a text that contains a secret. The message does not repeat it."""
    place = without_secrets(origins.of(key)) if key != "launcher.env_vars" else "launcher.env_vars"
    return RequestError(
        f"{place}: {key} holds {found}, and a configuration is written to run.yaml, manifest.json and the report. "
        "Leave it out: HF_TOKEN and WANDB_API_KEY reach the ranks by themselves; set others on the machines of the run",
        problem_id="secret-in-configuration",
    )


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[:20]}... ({len(value)} characters)"


def _no_such_reference(key: str, name: str, origins: Origins) -> str:
    override = origins.override(key)
    text = (override.input_line or "").partition("=")[2] if override is not None else f"${{{name}}}"
    return (
        f"${{{name}}} stands for the value of a key '{name}', which there is not."
        f"{did_you_mean(name, all_keys())} For the text itself type {typed(key, text.replace('${', chr(92) + '${'))}"
    )


def _near_value(key: str, value: str | None) -> str:
    """What to type instead of a value, if that can be guessed; otherwise empty."""
    described = type_of(key)
    if value is None:
        return ""
    if described.startswith("one of "):
        guess = did_you_mean(value, described.removeprefix("one of ").removesuffix(" or null").split(", "))
        return f".{guess}" if guess else ""
    if described.startswith("a list") and not value.startswith(("[", "{")) and value != "null":
        return f"; type {shell_word(f'{key}=[{value}]')}"
    if described.startswith("a whole number") and re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", value.lower()):
        number = float(value)
        return f"; type {key}={number:.0f}" if number.is_integer() else ""
    if key == "dataset.path" and value.startswith("["):
        return "; for several files type a glob, or dataset=mixture dataset.parts.NAME.path=FILE"
    if key.startswith("dataset.parts.") and value != "null":
        return f"; type {typed(f'{key}.path', value)}"
    return ""
