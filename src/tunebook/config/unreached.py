"""Parts of a model that text does not use, such as an image encoder: they get no gradient and are not trained.

They are found by a pass without memory (`plan.architecture.build`) and stored as patterns of parameter names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Set

from tunebook.config.model_facts import ModelFacts

_ANY_NUMBER = "*"


def as_patterns(unreached: Set[str], everything: Collection[str]) -> list[str]:
    """The names of parameters as short patterns: a module for all parameters in it, and `*` for any layer number.

    `everything` has the names of all parameters. The patterns match exactly the names in `unreached`.
    """
    reached = {name for name in everything if name not in unreached}
    whole = {_outermost(name, reached) for name in unreached}
    found: set[str] = set()
    for module in sorted(whole):
        pattern = ".".join(_ANY_NUMBER if part.isdecimal() else part for part in module.split("."))
        is_alike = not any(_compiled([pattern]).fullmatch(name) for name in reached)
        found.add(pattern if is_alike else module)
    return sorted(found)


def expression(patterns: Collection[str]) -> str:
    """A regular expression that matches the full names of the modules and parameters of the patterns."""
    each = (re.escape(pattern).replace(re.escape(_ANY_NUMBER), r"\d+") for pattern in patterns)
    return rf"(?:{'|'.join(each)})(?:\..+)?"


def stand_for(patterns: Collection[str], name: str) -> bool:
    """True if a parameter's name matches one of the patterns."""
    return bool(patterns) and _compiled(patterns).fullmatch(name) is not None


def unreached_of(facts: ModelFacts | None) -> list[str]:
    """The patterns of a model's unreached parts; empty if they were never looked for."""
    return [] if facts is None else facts.unreached


def _compiled(patterns: Collection[str]) -> re.Pattern[str]:
    return re.compile(expression(patterns))


def _outermost(name: str, reached: Set[str]) -> str:
    """The outermost module of a parameter without any reached parameter; the parameter's name if there is none."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if not any(other.startswith(f"{module}.") for other in reached):
            return module
    return name
