"""Parts of a model that text does not use, such as an image encoder: they get no gradient and are not trained.

They are found by a pass without memory (`plan.architecture.build`) and stored by the names of their modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Set

from tunebook.config.model_facts import ModelFacts


def outermost_modules(unreached: Set[str], everything: Collection[str]) -> list[str]:
    """The outermost modules that have no other parameters than unreached ones; a parameter's name if there is none.

    `everything` has the names of all parameters.
    """
    reached = [name.split(".") for name in everything if name not in unreached]
    used = {".".join(parts[:length]) for parts in reached for length in range(1, len(parts) + 1)}
    outermost: set[str] = set()
    for name in unreached:
        parts = name.split(".")
        modules = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        outermost.add(next(module for module in modules if module not in used))
    return sorted(outermost)


def expression(modules: Collection[str]) -> str:
    """A regular expression that matches the full names of the modules, and of all that is in them."""
    return rf"(?:{'|'.join(map(re.escape, modules))})(?:\..+)?"


def is_in(modules: Collection[str], name: str) -> bool:
    """True if a parameter is in one of the modules."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def unreached_of(facts: ModelFacts | None) -> list[str]:
    """The modules of a model that text does not reach; empty if they were never looked for."""
    return [] if facts is None else facts.unreached
