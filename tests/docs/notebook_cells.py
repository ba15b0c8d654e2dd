"""Read a notebook and execute its code cells in order, without Jupyter.

A line that begins with `!` is a shell command, in which `{name}` is the value of a variable, as in IPython. The other
lines are Python. `IPython.display`, which every notebook has, is replaced by a stand-in that collects what is
displayed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_COMMAND = re.compile(r"^!(.*)$", re.MULTILINE)
_VARIABLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Displayed:
    """What a cell gave to `display`: the name of its class and its text."""

    kind: str
    text: str


def code_cells(notebook: Path) -> dict[str, str]:
    """The source of every code cell, by the cell's id."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def as_python(source: str) -> str:
    """A cell with every shell command changed to a call of `run_shell`."""
    return _COMMAND.sub(lambda found: f"run_shell({found[1]!r})", source)


def execute(cells: dict[str, str], run_command: Callable[[str], int]) -> list[Displayed]:
    """Execute cells in order and return what they display; a command that does not exit with 0 fails the test.

    `run_command` runs a shell command and returns its exit code.
    """
    variables: dict[str, Any] = {"__name__": "__main__"}

    def run_shell(command: str) -> None:
        command = _VARIABLE.sub(lambda found: str(variables[found[1]]), command)
        exit_code = run_command(command)
        if exit_code != 0:
            pytest.fail(f"exit code {exit_code} of: {command}")

    variables["run_shell"] = run_shell
    with _display_stand_in() as displayed:
        for cell_id, source in cells.items():
            exec(compile(as_python(source), f"cell {cell_id}", "exec"), variables)
    return displayed


@contextmanager
def _display_stand_in() -> Iterator[list[Displayed]]:
    """Replace `IPython.display` and collect what is displayed."""
    displayed: list[Displayed] = []
    module = ModuleType("IPython.display")
    module.display = displayed.append
    module.HTML = lambda text: Displayed("HTML", text)
    module.SVG = lambda text: Displayed("SVG", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", ModuleType("IPython"))
        patch.setitem(sys.modules, "IPython.display", module)
        yield displayed
