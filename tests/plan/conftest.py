"""Configurations and machines that planning is tried on: those of `config`'s tests."""

from __future__ import annotations

from ..config.conftest import changed, machine, sound, undecided  # noqa: F401
