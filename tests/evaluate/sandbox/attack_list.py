"""The programs that attack the sandbox: every function in attacks/*.py is one, and is sent as text.

`answer()` is called by the test, and returns 42 if the attack came through. So a program that passes is a breach, and
one that is stopped fails. The end of its docstring says how it may be stopped. The
file's imports and the functions whose names begin with _ are sent with it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "attacks"
TEST = "assert answer() == 42"
# What is judged after an attack, and finds nothing of it.
RIGHT = """
import os
def answer():
    assert os.getcwd() == "/work" and os.listdir() == []
    assert set(filter(str.isdigit, os.listdir("/proc"))) == {"1", str(os.getpid())}
    assert os.environ.keys() == {"PATH", "HOME", "TMPDIR", "LANG"}
    return 42
"""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One program, and what may be said of it: statuses of outcomes."""

    name: str
    source: str
    stopped_as: frozenset[str]

    @property
    def time_limit_s(self) -> float:
        """Short for those that end by it, and otherwise long enough for a busy machine."""
        return 1.0 if "timed_out" in self.stopped_as else 15.0


def load_attacks() -> list[Attack]:
    """Every attack, in the order of the files."""
    return [attack for file in sorted(FOLDER.glob("*.py")) for attack in _attacks_of(file.read_text(encoding="utf-8"))]


def _attacks_of(text: str) -> list[Attack]:
    nodes = ast.parse(text).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    helpers = [node for node in functions if node.name.startswith("_")]
    shared = "\n".join(ast.unparse(node) for node in nodes if isinstance(node, ast.Import) or node in helpers)
    return [
        Attack(
            name=function.name,
            # `at_once` runs as the program does, before its test; any other attack is the answer itself.
            source=f"{shared}\n{ast.unparse(function)}\n"
            f"{f'{function.name}()' if function.args.args else f'answer = {function.name}'}",
            stopped_as=frozenset(
                (ast.get_docstring(function) or "").rpartition("Stopped as ")[2].rstrip(".").split(", ")
            ),
        )
        for function in functions
        if function not in helpers
    ]
