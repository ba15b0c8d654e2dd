"""The GitHub workflows: what they may do, that their scripts are sound and can run, and that they repeat facts rightly.

`make lint` runs zizmor on them, and the workflow itself actionlint, which no package registry offers as a whole.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {path.stem: path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
# YAML 1.1 reads the key `on` as true.
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {f"{name}.{job}": facts for name, flow in WORKFLOWS.items() for job, facts in flow["jobs"].items()}
SCRIPTS = {
    f"{job}.{step.get('name', '')}": step["run"]
    for job, facts in JOBS.items()
    for step in facts["steps"]
    if "run" in step
}


def tool(name: str) -> str:
    """A tool of requirements-dev.in."""
    found = shutil.which(name, path=str(ROOT / ".venv" / "bin")) or shutil.which(name)
    assert found, f"{name} is in docker/requirements-dev.in: make setup"
    return found


# --- rights


def test_only_the_job_that_pushes_may_write_and_only_packages() -> None:
    assert {name: flow["permissions"] for name, flow in WORKFLOWS.items()} == {"ci": {"contents": "read"}, "images": {}}
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "images.image": {"contents": "read", "packages": "write"},
        "images.digests": {},
    }


@pytest.mark.parametrize("name", TEXTS)
def test_every_action_is_pinned_by_a_commit_and_names_its_version(name: str) -> None:
    used = re.findall(r"uses: *(.*)", TEXTS[name])
    assert used
    pinned = r"actions/(checkout|upload-artifact)(/merge)?@[0-9a-f]{40}  # v\d+\.\d+\.\d+"
    assert [line for line in used if not re.fullmatch(pinned, line)] == []


@pytest.mark.parametrize("job", JOBS)
def test_a_job_ends_and_a_checkout_keeps_no_token(job: str) -> None:
    assert JOBS[job]["timeout-minutes"] > 0
    for step in JOBS[job]["steps"]:
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


# --- scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_valid_and_shellcheck_finds_nothing(name: str) -> None:
    script = f"#!/usr/bin/env bash\n{SCRIPTS[name]}"
    assert "${{" not in script  # GitHub would put text of the event into the script: pass it by env
    for words in (["bash", "-n"], [tool("shellcheck"), "-"]):
        done = subprocess.run(words, input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
