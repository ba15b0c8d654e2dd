"""What `tunebook explain NAME` prints: a rule's docstring, a setting, a group, a choice, a key of another tool."""

from __future__ import annotations

from textwrap import fill

from tunebook.config.descriptions import Description, Section, sections
from tunebook.config.foreign import instead_of, names
from tunebook.errors import RequestError, did_you_mean
from tunebook.plan.rules import RULES

_WIDTH = 80


def explain(name: str) -> str:
    """The meaning of a rule, a setting, a group or a choice, or of a key of another tool; for `all`, groups and rules.

    Raises: RequestError for an unknown name, with the nearest one.
    """
    rules = {rule.id: rule for rule in RULES}
    if name == "all":
        groups = [_entry(f"{key}: {section.meaning}") for key, section in sections().items() if key]
        return "\n".join(["Groups of settings", *groups, "", "Rules", *(f"  {id}" for id in sorted(rules))])
    if name in rules:
        rule = rules[name]
        return f"{name}{f' ({rule.key})' if rule.key else ''}\n\n{rule.why}"
    if name in sections() and name:
        return _section(sections()[name])
    settings = [setting for section in sections().values() for setting in section.settings]
    if found := [setting for setting in settings if setting.key == name]:
        return "\n\n".join(map(_setting, found))
    if instead := instead_of(*name.split("=", 1)):
        return instead
    if "=" in name:
        return explain(name.partition("=")[0])
    groups_with = [section for section in sections().values() if name in section.choices]
    if groups_with:
        return "\n".join(_entry(f"{group.name}={name}: {group.choices[name]}") for group in groups_with)
    known = [*rules, *sections(), *(setting.key for setting in settings), *names()]
    hint = did_you_mean(name, known, "All groups and rules: tunebook explain all")
    raise RequestError(f"there is no setting, group, choice or rule '{name}'.{hint}", problem_id="unknown-id")


def _section(section: Section) -> str:
    choices = [_entry(f"{choice}: {meaning}") for choice, meaning in section.choices.items()]
    listed = ["\n".join([f"{section.name}=CHOICE, one of", *choices])] if choices else []
    heading = fill(f"{section.name}: {section.meaning}", _WIDTH)
    return "\n\n".join([heading, *listed, *map(_setting, section.settings)])


def _setting(setting: Description) -> str:
    only = f" ({', '.join(setting.choices)})" if setting.choices else ""
    facts = f"default: {setting.default}; values: {setting.values}"
    return "\n".join([f"{setting.key}{only}", _paragraph(setting.meaning), _paragraph(facts)])


def _paragraph(text: str) -> str:
    return fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _entry(text: str) -> str:
    return fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
