"""What to type instead of a command line of other tools: their commands, their options, and settings with dashes.

It is asked once the parser has refused a command line, with the parser's own error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tunebook.config.book import find_recipes
from tunebook.config.foreign import Foreign, answer_key, find_command, find_option
from tunebook.config.override_text import shell_command, shell_word, typed
from tunebook.config.schema import GROUPS
from tunebook.config.walk import all_keys
from tunebook.errors import did_you_mean

_COMPOSING = ("train", "plan", "doctor", "data", "sweep", "fetch")  # commands that take settings of a run
# Of other commands: the settings that they take as key=value words.
_SETTINGS = {
    "eval": ("run", "model", "suite", "tasks", "task"),
    "fetch": ("suite", "tasks", "task"),
    "chat": ("run", "model"),
}
_OF_RUNS = ("report", "verify", "reproduce", "diff", "export")
_HOW_SETTINGS_ARE_TYPED = "Settings are typed as key=value, without dashes, such as training.max_steps=20"


def advice(error: Exception, arguments: Sequence[str], commands: Iterable[str]) -> str | None:
    """What to type instead of what the parser refused; None where nothing is known but what it says itself."""
    context: Any = getattr(error, "ctx", None)
    message = str(getattr(error, "message", ""))
    if context is None:
        return None
    if type(error).__name__ == "NoSuchOption":
        return _of_options(context, list(arguments))
    if message.startswith("No such command"):
        return _of_command(list(arguments), commands)
    if message.startswith("Got unexpected extra argument"):
        return _of_extra_words(context, list(arguments))
    return None


def _of_command(arguments: list[str], commands: Iterable[str]) -> str:
    """A command that there is not: another tool's, a recipe's name, or a misspelling."""
    place = next((index for index, word in enumerate(arguments) if not word.startswith("-")), 0)
    name, rest = arguments[place], arguments[place + 1 :]
    entry = find_command(name.lower())
    if entry is not None and entry.forms:
        return f"there is no command '{name}'; type: {_filled(entry, words=rest)}{_sentence(entry)}"
    if entry is not None:
        return f"there is no command '{name}'.{_sentence(entry)}"
    if "=" in name or name in find_recipes([]):
        return f"there is no command '{name}'; type: {shell_command(['tunebook', 'train', name, *rest])}"
    known = sorted(commands)
    return f"there is no command '{name}'.{did_you_mean(name, known)} Commands: {', '.join(known)}"


def _of_options(context: Any, arguments: list[str]) -> str:
    """Every option that the command does not have, each with what to type instead."""
    command, takes_value = context.info_name, _own_options(context)
    is_before_the_command = context.parent is None
    after = arguments if is_before_the_command else arguments[arguments.index(command) + 1 :]
    words, foreign = _separate(after, takes_value)
    if is_before_the_command:
        command, *words = words or ["train"]
    lines = []
    for option, value in foreign:
        answer = _answer_option(command, option, value, words, takes_value) or _answer_setting(command, option, value)
        lines.append(answer or f"there is no option '{option}'.{did_you_mean(option, takes_value)}")
    return "\n".join([*lines, *([_HOW_SETTINGS_ARE_TYPED] if command in _COMPOSING else [])])


def _own_options(context: Any) -> dict[str, bool]:
    """The options of a command by name, and whether each takes the next word as its value."""
    options = {"--help": False, "-h": False}
    for parameter in context.command.params:
        is_flag = getattr(parameter, "is_flag", True)
        options |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], not is_flag)
    return {name: takes_value for name, takes_value in options.items() if name.startswith("-")}


def _separate(words: list[str], own: dict[str, bool]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The words that the command takes, and the options that it does not have, with the value that follows each."""
    kept: list[str] = []
    foreign: list[tuple[str, str | None]] = []
    left = deque(words)
    while left:
        word = left.popleft()
        name, has_value, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            kept.append(word)
        elif name in own:
            kept.append(word)
            if own[name] and not has_value and left:
                kept.append(left.popleft())
        elif has_value:
            foreign.append((name, value))
        else:
            foreign.append((name, left.popleft() if left and _takes(name, left[0]) else None))
    return kept, foreign


def _takes(option: str, word: str) -> bool:
    """Whether the word after an option is its value and not another option or a setting."""
    if (entry := find_option(option)) is not None:
        return entry.takes_value
    is_number = word[1:].replace(".", "", 1).isdigit()
    return "=" not in word and (not word.startswith("-") or is_number)


def _answer_option(command: str, option: str, value: str | None, words: list[str], own: dict[str, bool]) -> str | None:
    """What to type instead of an option that is no setting of a run; None for one that may be."""
    name, with_dashes = option.lstrip("-"), option.replace("_", "-")
    if with_dashes in own:
        return f"there is no option '{option}'; type {with_dashes}{'' if value is None else f' {shell_word(value)}'}"
    if command == "explain":
        return f"there is no option '{option}'; type: tunebook explain {name}"
    if name in _SETTINGS.get(command, ()):
        return f"there is no option '{option}'; type {typed(name, value or 'VALUE')}"
    if command in _OF_RUNS and name in ("run", "runs", "run-dir"):
        return f"there is no option '{option}'; type the run alone: tunebook {command} {value or 'RUN'}"
    if command in _COMPOSING and (entry := find_option(option)) is not None:
        instead = f"; type: {_filled(entry, command=command, words=words, value=value)}" if entry.forms else "."
        return f"there is no option '{option}'{instead}{_sentence(entry)}"
    return None


def _answer_setting(command: str, option: str, value: str | None) -> str | None:
    """What to type instead of a setting with dashes, ours or another tool's; None where nothing is known of it."""
    name = option.lstrip("-")
    if command not in _COMPOSING:
        return None
    if name in all_keys() or name in GROUPS:
        return f"'{option}': settings have no dashes; type {typed(name, 'VALUE' if value is None else value)}"
    answer = answer_key(name, "true" if value is None else value)
    return None if answer is None else f"'{option}': {answer}"


def _of_extra_words(context: Any, arguments: list[str]) -> str | None:
    """`merge=true` where a command has an option of that name."""
    own = _own_options(context)
    lines = []
    for word in arguments:
        key, has_value, value = word.partition("=")
        option = f"--{key.replace('_', '-')}"
        if has_value and option in own:
            is_off = value.lower() in ("false", "0", "no")
            instead = f"{option} {shell_word(value)}" if own[option] else "nothing" if is_off else option
            lines.append(f"'{word}': options have dashes; type {instead}")
    return "\n".join(lines) or None


def _filled(entry: Foreign, *, command: str = "", words: Sequence[str] = (), value: str | None = None) -> str:
    """The command line of an entry."""
    has_recipe = bool(words) and "=" not in words[0] and not words[0].startswith("-")
    file = Path(value or "FOLDER/RECIPE.yaml")
    known = {
        "command": command,
        "words": shell_command(words),
        "rest": shell_command(words[1:] if has_recipe else words),
        "value": shell_word(value) if value is not None else "VALUE",
        "stem": file.stem,
        "folder": str(file.parent),
    }
    words_of_template = (entry.forms[0].type or "").split(" ")
    return " ".join(filter(None, (word.format_map(known) for word in words_of_template)))


def _sentence(entry: Foreign) -> str:
    return f"\n{entry.say}" if entry.say else ""
