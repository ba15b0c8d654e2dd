"""The runner's side is all that the sandbox's image holds, with nothing but Python's standard library."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tunebook.evaluate.sandbox.jobs import RUNNER_MODULES
from tunebook.evaluate.sandbox.judge import FOLDER


def test_it_starts_from_copies_without_any_package(tmp_path):
    package = tmp_path / "tunebook" / "evaluate" / "sandbox"
    package.mkdir(parents=True)
    for folder in (FOLDER.parent.parent, FOLDER.parent, FOLDER):
        shutil.copy(folder / "__init__.py", tmp_path / folder.relative_to(FOLDER.parent.parent.parent))
    for name in RUNNER_MODULES:
        shutil.copy(FOLDER / f"{name}.py", package)
    words = [sys.executable, "-S", "-B", "-W", "error", "-m", "tunebook.evaluate.sandbox.runner", "--help"]
    done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--handover" in done.stdout


def test_children_import_nothing_that_takes_long():
    code = (
        "import sys; before = set(sys.modules)\n"
        "from tunebook.evaluate.sandbox import checker, solution\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    words = [sys.executable, "-S", "-c", code]
    environment = {"PYTHONPATH": str(FOLDER.parent.parent.parent)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    library = {name for name in done.stdout.split() if not name.startswith("tunebook")}
    assert not library & {"collections", "enum", "functools", "json", "re", "typing"}
