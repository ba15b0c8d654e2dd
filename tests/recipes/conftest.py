"""Recipes and the commands that name them, each composed once in a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tunebook.config.compose import Composition, compose

Composed = Callable[..., Composition]


@pytest.fixture(scope="session")
def composed() -> Composed:
    """`composed("quickstart", "training.seed=1")`: a composition that no test may change."""
    return cache(lambda recipe, *overrides: compose(recipe, [*overrides]))
