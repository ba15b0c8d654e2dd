"""Paths and targets of make that AGENTS.md, CHANGELOG.md and SECURITY.md name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
MARKDOWN = ("AGENTS.md", "CHANGELOG.md", "SECURITY.md")


@pytest.mark.parametrize("name", MARKDOWN)
def test_paths_and_targets_that_are_named_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.MULTILINE))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
    linked = re.findall(r"\]\(([^):]+)\)", text)
    quoted = re.findall(r"`((?:src|docker|tests|docs|recipes|hydra_configs)/[^` ]*)`", text)
    missing = [path for path in [*linked, *quoted] if not list(ROOT.glob(path.replace("<name>", "*").rstrip("/")))]
    assert missing == []
