"""Write the page "Settings" from the comments of the schema: `python docs/settings.py > docs/settings.md`."""

from __future__ import annotations

from tunebook.config.descriptions import Description, Section, sections

INTRODUCTION = """\
# Settings

Every setting with its default, which is its value without a recipe. A recipe or a choice may set another;
`tunebook plan --yaml` shows every value with its origin. `tunebook explain training.max_length` prints one of these
rows, `tunebook explain training` the rows of a group.

A setting is typed `KEY=VALUE`: `training.max_length=1024`. A group that has choices takes one: `optimizer=muon`.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([INTRODUCTION, *map(_section, sections().values())])


def _section(section: Section) -> str:
    lines = [f"## {section.name or 'The run'}", "", section.meaning, ""]
    lines += [f"- `{section.name}={choice}`: {meaning}" for choice, meaning in section.choices.items()]
    lines += [""] if section.choices else []
    rows = ["| key | meaning | default | values | unit |", "|---|---|---|---|---|", *map(_row, section.settings)]
    return "\n".join([*lines, *rows, ""])


def _row(setting: Description) -> str:
    only = f" ({', '.join(setting.choices)})" if setting.choices else ""
    cells = [f"`{setting.key}`{only}", setting.meaning, f"`{setting.default}`", setting.values, setting.unit]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
