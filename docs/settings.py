"""Write the page "Settings" from the comments of the schema: `python docs/settings.py > docs/settings.md`."""

from __future__ import annotations

from tunebook.config.descriptions import Description, Section, sections

INTRODUCTION = """\
# Settings

Every setting with its default, which is its value without a recipe. A recipe or a choice may set another;
`tunebook plan --yaml` shows every value of a run. `tunebook explain training.max_length` prints one of these
rows, `tunebook explain training` the rows of a group.

The sizes of a model, `model.facts`, are in the files of `hydra_configs/model` and not here.

A setting is typed `KEY=VALUE`: `training.max_length=1024`. A group that has choices takes one: `optimizer=muon`.
"""


_LEFT_OUT = ("model.facts",)


def page() -> str:
    """The page as Markdown."""
    return "\n".join([INTRODUCTION, *(_section(one) for name, one in sections().items() if name not in _LEFT_OUT)])


def _section(section: Section) -> str:
    lines = [f"## {section.name or 'The run'}", "", section.meaning, ""]
    if section.name == "model":  # one list of them is enough
        lines += ["Its choices are the [models of the book](data.md#models).", ""]
    elif section.choices:
        lines += [*(f"- `{section.name}={choice}`: {meaning}" for choice, meaning in section.choices.items()), ""]
    rows = ["| key | meaning | default | values |", "|---|---|---|---|", *map(_row, section.settings)]
    return "\n".join([*lines, *rows, ""])


def _row(setting: Description) -> str:
    only = f" ({', '.join(setting.choices)})" if setting.choices else ""
    cells = [f"`{setting.key}`{only}", setting.meaning, f"`{setting.default}`", setting.values]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
