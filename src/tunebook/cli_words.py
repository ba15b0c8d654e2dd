"""The words of a command line that are no options: a recipe with Hydra overrides, or a few settings of a command."""

from __future__ import annotations

from tunebook.errors import RequestError, did_you_mean


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
                f"there is no setting '{key}' here.{did_you_mean(key, known)} Settings: {', '.join(known)}",
                problem_id="unknown-key",
            )
        said[key] = value
    return said


def task_names(said: dict[str, str]) -> list[str] | None:
    """The tasks that were named, by either spelling of the setting; None where none was."""
    if "tasks" not in said and "task" not in said:
        return None
    texts = [said[key].strip("[]") for key in ("tasks", "task") if key in said]
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
