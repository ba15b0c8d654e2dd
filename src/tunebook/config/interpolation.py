"""What `${...}` in a configuration may read: other keys, and environment variables that are not secret by their names.

Recipes are often written by others, and the values that they read are written to run.yaml, manifest.json and the
report. The name of a variable may be the result of another interpolation, so the check is in the resolver and does not
look at the text.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from tunebook.config.unsafe_text import is_secret_name


def guard_resolvers() -> None:
    """Restrict interpolations to the configuration and the variables of the environment.

    Hydra registers its own resolvers, such as the clock, with every composition.
    """
    OmegaConf.clear_resolvers()
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)


def to_object(tree: Any) -> Any:
    """The tree as dataclasses, with its interpolations resolved. Raises: OmegaConf's errors."""
    guard_resolvers()
    return OmegaConf.to_object(tree)


def _read_variable(name: str, *default: Any) -> str | None:
    if is_secret_name(name):
        raise ValueError(f"a configuration may not read {name}; tokens are read where they are needed")
    return oc.env(name, *default)


def escaped(value: Any) -> Any:
    """Plain values escaped so that OmegaConf reads no `${` in them as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: f"{2 * found[1]}\\${{", value)
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    return value
