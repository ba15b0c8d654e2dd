"""The files that GitHub, citation tools, pre-commit and coding agents read agree with the project."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

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


def test_the_hooks_are_commands_of_make_lint_and_format() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # the versions are those of the locks, and no network is needed
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "yamllint", "shellcheck"}
    for hook in hooks.values():
        command = shlex.join(word for word in shlex.split(hook["entry"]) if word != "--force-exclude")
        assert hook["language"] == "system"
        assert f"\t{command} " in MAKEFILE
    checked = re.compile(hooks["shellcheck"]["files"])
    scripts = [*(ROOT / ".ci").iterdir(), *(ROOT / "docker").rglob("*.sh")]
    found = {path for path in scripts if checked.search(path.relative_to(ROOT).as_posix())}
    assert found == {*(ROOT / ".ci").iterdir(), *(ROOT / "docker").glob("*.sh")}
