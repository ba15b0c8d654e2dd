"""Finished runs for the commands that read them."""

from ..evidence.conftest import make_run, recipes_dir, whole_run  # noqa: F401
