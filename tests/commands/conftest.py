"""Finished runs for the commands that read them."""

from ..evidence.conftest import card, make_run, record, whole_run  # noqa: F401
