"""The child that executes the test, and says whether it came through to its end.

The program is in another process, of another user, and is reached through `remote` only. The verdict goes to the worker
through a pipe that the program's process does not have, together with a nonce that it does not know.
"""

from __future__ import annotations

import builtins
import os
import sys

from tunebook.evaluate.sandbox.remote import TEST_FILE, Session
from tunebook.evaluate.sandbox.solution import line_number
from tunebook.evaluate.sandbox.values import SIZE, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the 3 ms that importing `ast` takes
VERDICT_DESCRIPTOR = 6


def main(settings: dict[str, Any]) -> None:
    """Execute `settings["test"]` and write the verdict with `settings["nonce"]`."""
    session = Session(4, 5)
    verdict = judge(settings["test"], session)
    message = encode({"nonce": settings["nonce"]} | verdict, session.give)
    os.write(VERDICT_DESCRIPTOR, SIZE.pack(len(message)) + message)
    os._exit(0)  # at once: the test may have left threads behind


def judge(test: str, session: Session) -> dict[str, Any]:
    """Whether the test comes to its end without an exception, and otherwise why not."""
    try:
        tree = compile(test, TEST_FILE, "exec", ONLY_AST, dont_inherit=True)
        code = compile(tree, TEST_FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"status": "failed", "message": f"the test itself cannot be compiled: {error}"}
    try:
        exec(code, {"__name__": "test"} | program_names(tree, session))
    except BaseException as error:  # as in code_eval, whatever the test raises is a failure
        if not session.is_closed:
            return {"status": "failed", **explain(error, test)}
    if session.is_closed:  # also where the test expected an exception and caught this one
        return {"status": "gone", "message": "the program ended before its test did"}
    return {"status": "passed", "message": ""}


def program_names(tree: Any, session: Session) -> dict[str, Any]:
    """What the test gets from the program: the names that it uses and does not define.

    A name of Python's own is taken from the program only where the test takes no other, as in `assert sum(1, 2) == 3`
    with a program that defines `sum`. Otherwise a program could bring its own `abs` or `all` along.
    """
    used, defined, only_dotted = names_of(tree)
    wanted = sorted(used - defined - set(dir(builtins)))
    found = session.names(wanted)
    for name in found:
        if name in only_dotted and name in sys.stdlib_module_names:  # as in `math.isclose`
            found[name] = __import__(name)
    if any(not _is_library(value) for value in found.values()):
        return found
    return found | session.names(sorted((used - defined) & set(dir(builtins))))


def _is_library(value: object) -> bool:
    return isinstance(value, type(sys)) or getattr(value, "__module__", None) in sys.stdlib_module_names


def names_of(tree: Any) -> tuple[set[str], set[str], set[str]]:
    """The names that some code uses, those that it defines, and those that it uses only as in `name.attribute`."""
    used: set[str] = set()
    defined: set[str] = set()
    bare: set[str] = set()
    for node, parent in _walk(tree, None):
        kind = type(node).__name__
        if kind == "Name" and type(node.ctx).__name__ == "Load":
            used.add(node.id)
            if type(parent).__name__ != "Attribute":
                bare.add(node.id)
        elif kind == "Name":
            defined.add(node.id)
        elif kind in ("FunctionDef", "AsyncFunctionDef", "ClassDef"):
            defined.add(node.name)
        elif kind == "arg":
            defined.add(node.arg)
        elif kind == "alias":
            defined.add(node.asname or node.name.partition(".")[0])
        elif kind == "ExceptHandler" and node.name:
            defined.add(node.name)
    return used, defined, used - bare


def _walk(node: Any, parent: Any) -> Iterator[tuple[Any, Any]]:
    todo = [(node, parent)]
    while todo:
        node, parent = todo.pop()
        yield node, parent
        for name in node._fields:
            value = getattr(node, name, None)
            children = value if isinstance(value, list) else [value]
            todo += [(child, node) for child in children if hasattr(child, "_fields")]


def explain(error: BaseException, test: str) -> dict[str, Any]:
    """What went wrong, and where: in the program if it came from there, else in the test."""
    program_error = getattr(error, "program_error", None)
    name = type(error).__name__
    text = f"{name}: {error}" if str(error) else name
    line = line_number(error.__traceback__, TEST_FILE)
    where = ""
    if line is not None:
        lines = test.splitlines()
        where = f" (test, line {line}: {lines[line - 1].strip()[:200] if line <= len(lines) else ''})"
    if program_error is None:
        return {"message": f"{text[:2000]}{where}", "kind": name, "errno": getattr(error, "errno", None)}
    text = f"{program_error['name']}: {program_error['text']}".rstrip(": ")
    at = f" (program, line {program_error['line']})" if program_error.get("line") else ""
    return {"message": f"{text}{at}{where}", "kind": program_error["name"], "errno": program_error.get("errno")}
