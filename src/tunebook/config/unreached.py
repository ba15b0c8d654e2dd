"""Parts of a model that no text reaches, such as a tower for images: they have no gradient and are not trained.

Found on the meta device (`plan.architecture.measure`), written down as patterns of names, and left alone by training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Set

from tunebook.config.model_facts import ModelFacts

_ANY_NUMBER = "*"


def as_patterns(unreached: Set[str], everything: Collection[str]) -> list[str]:
    """The names of parameters in short: a module for all that is in it, and `*` for the numbers of layers alike.

    `everything` has the names of all parameters. What comes back stands for `unreached` and for nothing else.
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
    """A regular expression for the whole names of the modules and parameters that patterns stand for."""
    each = (re.escape(pattern).replace(re.escape(_ANY_NUMBER), r"\d+") for pattern in patterns)
    return rf"(?:{'|'.join(each)})(?:\..+)?"


def stand_for(patterns: Collection[str], name: str) -> bool:
    """Whether a parameter is one of those that patterns stand for."""
    return bool(patterns) and _compiled(patterns).fullmatch(name) is not None


def unreached_of(facts: ModelFacts | None) -> list[str]:
    """What is known of a model to be out of reach; nothing where nobody has looked."""
    return [] if facts is None else facts.unreached


def _compiled(patterns: Collection[str]) -> re.Pattern[str]:
    return re.compile(expression(patterns))


def _outermost(name: str, reached: Set[str]) -> str:
    """The outermost module around a parameter in which nothing is reached; its own name where there is none."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if not any(other.startswith(f"{module}.") for other in reached):
            return module
    return name
