"""Resolved configurations and machines, as for the rules."""

from ...config.conftest import changed, machine, sound, undecided  # noqa: F401
