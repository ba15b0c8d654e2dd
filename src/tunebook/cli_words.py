"""The words of a command line that are no options: a recipe with Hydra overrides, or a few settings of a command."""

from __future__ import annotations

from pathlib import Path

from tunebook.errors import RequestError, did_you_mean

# The settings of commands that compose nothing, by the first name of their entry in config.foreign.
_OF_OTHER_TOOLS = {"model_name_or_path": "model", "eval_tasks": "tasks"}


def split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """A recipe's name, if the first word is one, and the overrides."""
    first, *rest = words or [""]
    if first and "=" not in first and not first.startswith(("+", "~")):
        return first, rest
    return None, [word for word in (first, *rest) if word]


def settings(words: list[str] | None, known: tuple[str, ...]) -> dict[str, str]:
    """`key=value` words of a command that composes nothing; a single bare word is the first key's value.

    Raises: RequestError for an unknown key, with the nearest.
    """
    said: dict[str, str] = {}
    for word in words or []:
        key, has_value, value = word.partition("=")
        if not has_value:
            key, value = known[0], word
        if key not in known:
            raise RequestError(
                f"there is no setting '{key}' here.{_instead(key, value, known)} Settings: {', '.join(known)}",
                problem_id="unknown-key",
            )
        said[key] = value
    return said


def _instead(key: str, value: str, known: tuple[str, ...]) -> str:
    """What another tool's name for a setting is here, or the nearest spelling."""
    from tunebook.config.foreign import find_key
    from tunebook.config.override_text import typed

    entry = find_key(key)
    setting = _OF_OTHER_TOOLS.get(entry.names[0][0]) if entry is not None else None
    return f" Type {typed(setting, value)} instead." if setting in known and setting else did_you_mean(key, known)


def named_run(word: str) -> str:
    """The run that a word names, also as `run=RUN` where it is a command's only setting.

    Raises: RequestError where nothing follows.
    """
    key, has_value, value = word.partition("=")
    if not has_value or key not in ("run", "runs", "model") or Path(word).exists():
        return word
    if not value:
        raise RequestError(
            f"'{word}' names no run; type {key}=FOLDER, {key}=RECIPE for its newest run, or {key}=latest",
            problem_id="unknown-run",
        )
    return value


def task_names(said: dict[str, str]) -> list[str] | None:
    """The tasks that were named, by either spelling of the setting; None where none was."""
    if "tasks" not in said and "task" not in said:
        return None
    texts = [said[key].strip("[]") for key in ("tasks", "task") if key in said]
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
