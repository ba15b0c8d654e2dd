"""The texts of `tunebook explain ID`: one for every rule and for every error with a `problem_id`.

Rules carry their own texts (`plan.rules`). All others are in `errors.yaml`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from tunebook.config.foreign import all_names, describe
from tunebook.config.interpolation import ALLOWED
from tunebook.errors import RequestError, did_you_mean
from tunebook.plan.rules import RULES
from tunebook.plan.rules.frame import Explanation


@cache
def error_texts() -> dict[str, Explanation]:
    """The texts of `errors.yaml` by id."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if PyYAML was built with it
    texts = yaml.load(Path(__file__).with_name("errors.yaml").read_text(encoding="utf-8"), loader)
    return {
        id: Explanation(**{part: text.replace("{allowed}", ALLOWED) for part, text in parts.items()})
        for id, parts in texts.items()
    }


def _texts() -> dict[str, Explanation]:
    """Every id and its text. An id that is both a rule and an error is the same thing, found earlier or later."""
    return {**error_texts(), **{rule.id: rule.explanation for rule in RULES}}


def all_ids() -> list[str]:
    """Every id that can be explained, in alphabetical order."""
    return sorted(_texts())


def explain(id: str) -> str:
    """The text of an id, or the meaning of a key of another tool.

    Raises: RequestError for an unknown id, with the nearest one.
    """
    texts = _texts()
    text = texts.get(id)
    if text is None and (foreign := describe(id)) is not None:
        return foreign
    if text is None:
        raise RequestError(
            f"there is nothing called '{id}' to explain.{did_you_mean(id, [*texts, *all_names()])} Every id: tunebook "
            "explain all",
            problem_id="unknown-id",
        )
    return f"{id}\n\n{text.summary}\n\nWhy: {text.why}\n\nWhat to do: {text.advice}"
