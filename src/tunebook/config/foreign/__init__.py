"""What other tools call things, and what to type here: keys and values, commands and options.

The tables are the YAML files of this folder; training.yaml says what an entry holds. An unknown key, choice, command or
option is looked up here before a similar spelling is suggested, and `tunebook explain NAME` prints an entry.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tunebook.config.override_text import split_values, typed, typed_list

_KEY_TABLES = ("training", "model_and_data", "machine")
_COMMAND_TABLE = "command_line"
_PATH, _HUB = "PATH", "HUB"  # as `when`: the value names a file or a folder, or is ORG/NAME
_ORG_NAME = re.compile(r"[^/\s]+/[^/\s]+")
_FILE = re.compile(r"(\.{0,2}/|~).*|.*[*?].*|.*\.(jsonl?|parquet|csv|tsv|txt|jinja2?|ya?ml|gz|xz|zst|zip)", re.DOTALL)
_SWEPT = re.compile(r"[\w.+:/-]+(,[\w.+:/-]+)+")  # values of a sweep, which stay apart
_QUOTED_LIST = re.compile(r"'([\w.]+)=\[\{list\}\]'")
_NO_VALUE = "VALUE"
_OTHERS = "others"  # in place of tools: names that people use without one of these tools


@dataclass(frozen=True, kw_only=True)
class Form:
    """What to type for some values; without `when` for every other one, without `type` nothing."""

    when: str | None
    means: str | None  # `when` in words, where it is more than values
    type: str | None
    say: str | None

    def fits(self, value: str) -> bool:
        """Whether this is for a value, whatever the case of its letters."""
        if self.when == _PATH:
            return _FILE.fullmatch(value) is not None or _exists(value)
        if self.when == _HUB:
            return _ORG_NAME.fullmatch(value) is not None
        return self.when is None or re.fullmatch(self.when, value, re.IGNORECASE) is not None

    @property
    def values(self) -> str:
        """The values that it is for, in words."""
        if self.when is None:
            return "any other value"
        named = self.means or {_PATH: "a file or folder", _HUB: "ORG/NAME"}.get(self.when)
        return named or self.when.replace(".*", "...").replace("|", ", ")

    @property
    def shown(self) -> str:
        """What to type for any value, or why there is nothing."""
        template = self.type or self.say or ""
        return template.replace("{value}", _NO_VALUE).replace("{list}", "A,B").replace("{1}", "A").replace("{2}", "B")

    def words(self, value: str) -> list[str]:
        """What to type for a value, word by word, quoted where Hydra or a shell needs it."""
        return [self._word(word, value) for word in (self.type or "").split(" ")]

    def _word(self, word: str, value: str) -> str:
        key, _, rest = word.partition("=")
        if (found := _QUOTED_LIST.fullmatch(word)) is not None:
            entries = (entry.strip().strip("'\"") for entry in split_values(value.strip("[]() ")))
            return typed_list(found[1], filter(None, entries))
        if rest == "{value}" and not _SWEPT.fullmatch(value):
            return typed(key, value)
        parts = re.fullmatch(self.when, value, re.IGNORECASE) if self.when not in (None, _PATH, _HUB) else None
        for number, part in enumerate(parts.groups() if parts else (), 1):
            word = word.replace(f"{{{number}}}", part or "")
        return word.replace("{value}", value)


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What one thing is called elsewhere, and what it is here."""

    names: tuple[tuple[str, tuple[str, ...]], ...]  # each with the tools that call it so
    forms: tuple[Form, ...]
    say: str
    example: str
    takes_value: bool

    @property
    def is_offered(self) -> bool:
        """Whether there is anything to type, or a value to leave out."""
        return bool(self.forms)

    def tools_of(self, name: str) -> str:
        """The tools that use a name, with commas; empty for one of nobody in particular."""
        return ", ".join(dict(self.names).get(name, ()))

    def form_for(self, value: str) -> Form:
        """The first form that fits a value."""
        return next((form for form in self.forms if form.fits(value)), Form(when=None, means=None, type=None, say=None))


def find_key(key: str) -> Foreign | None:
    """The entry of a foreign key, also with dashes, in capitals, or below a section: `--training.Lora-R`."""
    found = _find(key)
    return None if found is None else found[1]


def _find(key: str) -> tuple[str, Foreign] | None:
    """The name of the tables that a key ends with, the longest, and its entry."""
    parts = re.sub(r"[/:]", ".", key.lstrip("-").replace("-", "_").lower()).split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))
    known = _keys()
    return next(((name, known[name]) for name in names if name in known), None)


def answer_key(key: str, value: str | None) -> str | None:
    """That there is no such key, and what to type for this value instead; None for a key that no table has."""
    found = _find(key)
    if found is None:
        return None
    name, entry = found
    tools = entry.tools_of(name)
    there_is_none = f"there is no key '{key.lstrip('-')}'{f' as in {tools}' if tools else ''}"
    if not entry.is_offered:
        return f"{there_is_none}: it is not offered. {entry.say}"
    bare = _without_quotes(value or "")
    form = entry.form_for(bare or entry.example)
    if form.type is None:
        return f"{there_is_none}. {form.say or entry.say}"
    words = _within(form.words(bare or _NO_VALUE), key)
    ours = words[0].lstrip("'").partition("=")[0]
    if len(words) == 1 and ours.rpartition(".")[2] == name.rpartition(".")[2]:  # in another section
        return f"{there_is_none}. Did you mean '{ours}'? Type {words[0]}. {form.say or entry.say}"
    return f"{there_is_none}; type {' '.join(words)} instead. {form.say or entry.say}"


def answer_choice(group: str, value: str, *, is_near_another: bool = False) -> str | None:
    """What to type instead of a choice that a group does not have; None where no table knows it.

    What tables say of any other value is left out for one that is near the spelling of a choice.
    """
    entry, bare = _groups().get(group), _without_quotes(value)
    if entry is None or not bare:
        return None
    form = entry.form_for(bare)
    if form.when is None and (is_near_another or not (form.type or form.say)):
        return None
    instead = f"type {' '.join(form.words(bare))} instead" if form.type is not None else None
    return ". ".join(filter(None, [instead, form.say or entry.say])).removesuffix(".") + "."


def find_command(name: str) -> Foreign | None:
    """The entry of another tool's command."""
    return _command_line("commands").get(name)


def find_option(name: str) -> Foreign | None:
    """The entry of an option of another tool that is no setting, with its dashes."""
    return _command_line("options").get(name)


def describe(name: str) -> str | None:
    """What `tunebook explain NAME` prints of a foreign key; None for a name that no table has."""
    found = _find(name) or ((name, _groups()[name]) if name in _groups() else None)
    if found is None:
        return None
    known_as, entry = found
    tools = entry.tools_of(known_as)
    head = f"{name.lstrip('-')}{f', as it is called in {tools}' if tools else ''}"
    if not entry.is_offered:
        return f"{head}\n\nTunebook does not offer it.\n\n{entry.say}"
    lines = [f"  {form.values}: {form.shown}" for form in entry.forms]
    if len(lines) == 1:
        lines = [f"Here: {entry.forms[0].shown}"]
    return "\n\n".join(filter(None, [head, "\n".join(lines), entry.say]))


def all_names() -> list[str]:
    """Every foreign key of the tables, by the alphabet."""
    return sorted(_keys())


def commands() -> list[Foreign]:
    """Every entry for commands, in the order of the table."""
    return list(dict.fromkeys(_command_line("commands").values()))


def entries() -> list[Foreign]:
    """Every entry for keys and for values of a group, as the tables have them."""
    found = [*_keys().values(), *_groups().values()]
    return list(dict.fromkeys(found))


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return False


def _without_quotes(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _within(words: list[str], key: str) -> list[str]:
    """What to type, without the choice of a group that the user names already by typing a key below it."""
    group = key.partition(".")[0] if "." in key else None
    return [word for word in words if word.partition("=")[0] != group] or words


@functools.cache
def _keys() -> Mapping[str, Foreign]:
    found: dict[str, Foreign] = {}
    for table in _KEY_TABLES:
        for read in _read(table):
            if "called" in read:
                entry = _entry(read, read["called"])
                found |= {name: entry for name, _ in entry.names}
    return found


@functools.cache
def _groups() -> Mapping[str, Foreign]:
    groups = (read for table in _KEY_TABLES for read in _read(table) if "group" in read)
    return {read["group"]: _entry(read, {", ".join(read["of"]): [read["group"]]}) for read in groups}


@functools.cache
def _command_line(kind: str) -> Mapping[str, Foreign]:
    entries = (_entry(read, {", ".join(read["of"]): read["names"]}) for read in _read(_COMMAND_TABLE)[kind])
    return {name: entry for entry in entries for name, _ in entry.names}


@functools.cache
def _read(table: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(f"{table}.yaml").read_text(encoding="utf-8"))


def _entry(read: dict[str, Any], called: dict[str, list[str]]) -> Foreign:
    forms = read.get("by") or ([{"type": read["type"]}] if "type" in read else [])
    tools = {
        name: () if users in ("", _OTHERS) else tuple(users.split(", ")) for users in called for name in called[users]
    }
    return Foreign(
        names=tuple(tools.items()),
        forms=tuple(Form(**{name: one.get(name) for name in ("when", "means", "type", "say")}) for one in forms),
        say=read.get("say", ""),
        example=_text(read.get("example", 1)),
        takes_value=read.get("takes_value", True),
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
