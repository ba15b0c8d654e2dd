"""The texts of `tunebook explain ID`: one for every rule and for every error with a `problem_id`.

All texts are in `errors.yaml`. `python -m tunebook.explain` prints them as Markdown, which is `docs/errors.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tunebook.config.foreign import instead_of
from tunebook.config.interpolation import ALLOWED
from tunebook.errors import RequestError, did_you_mean

_FILE = Path(__file__).with_name("errors.yaml")
_SECTION = "# --- "  # begins the comment that names the section of the ids below it
_INTRODUCTION = """\
# Errors and rules

Every message of Tunebook about a known problem ends with an id. `tunebook explain ID` prints what is listed here.
This page is generated from `src/tunebook/errors.yaml`: `python -m tunebook.explain > docs/errors.md`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an unexpected error |
| 2 | the request is wrong: configuration, rule, unknown name |
| 3 | the plan does not fit, or memory or disk space ran out |
| 4 | the data is wrong |
| 5 | `verify` found a difference |
| 6 | stopped on request after a clean save |
| 7 | the training is invalid: a loss that is not finite, a leak between documents |
"""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is known about one id."""

    summary: str
    why: str
    advice: str


@cache
def error_texts() -> dict[str, Explanation]:
    """The texts of `errors.yaml` by id."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it
    texts = yaml.load(_FILE.read_text(encoding="utf-8"), loader)
    return {
        id: Explanation(**{part: text.replace("{allowed}", ALLOWED) for part, text in parts.items()})
        for id, parts in texts.items()
    }


def all_ids() -> list[str]:
    """Every id that can be explained, in alphabetical order."""
    return sorted(error_texts())


def explain(id: str) -> str:
    """The text of an id, or the meaning of a key of another tool.

    Raises: RequestError for an unknown id, with the nearest one.
    """
    texts = error_texts()
    text = texts.get(id)
    if text is None and (instead := instead_of(id)):
        return f"there is no key '{id}'{instead}"
    if text is None:
        raise RequestError(
            f"there is nothing called '{id}' to explain.{did_you_mean(id, texts)} Every id: tunebook explain all",
            problem_id="unknown-id",
        )
    return f"{id}\n\n{text.summary}\n\nWhy: {text.why}\n\nWhat to do: {text.advice}"


def sections() -> dict[str, list[str]]:
    """The ids of `errors.yaml` under the headings of its comments, in the order of the file."""
    found: dict[str, list[str]] = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith(_SECTION):
            ids = found.setdefault(line.removeprefix(_SECTION), [])
        elif match := re.fullmatch(r"([a-z0-9-]+):", line):
            ids.append(match[1])
    return found


def as_markdown() -> str:
    """Every text as one page with a table of contents by section."""
    lines, texts = [_INTRODUCTION, "## Contents\n"], error_texts()
    for title, ids in sections().items():
        lines.append(f"- **{title}**: {', '.join(f'[{id}](#{id})' for id in sorted(ids))}")
    for title, ids in sections().items():
        lines.append(f"\n## {title}")
        for id in sorted(ids):
            text = texts[id]
            lines.append(f"\n### {id}\n\n{text.summary}\n\n*Why:* {text.why}\n\n*What to do:* {text.advice}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
