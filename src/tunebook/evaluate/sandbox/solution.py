"""The child that executes a program: runs it once, then does what the test asks of its functions and objects.

Nothing here is trusted once the program has run: it shares the process, and may change anything in it. It knows neither
the test nor the nonce, and what it answers is checked by `checker` in a process that it cannot reach.
"""

from __future__ import annotations

import _operator
import builtins
import sys

from tunebook.evaluate.sandbox.channel import Channel, RemoteError
from tunebook.evaluate.sandbox.values import OF_PROGRAM, OF_TEST, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

PROGRAM_FILE = "<program>"
MODULE_NAME = "solution"  # not `__main__`: as in code_eval, what a program does only as a script is not executed
MAX_TEXT = 2000
ModuleType = type(sys)


def main(settings: dict[str, Any]) -> None:
    """Execute `settings["source"]`, then serve the test over descriptors 4 and 5."""
    program = sys.modules[MODULE_NAME] = ModuleType(MODULE_NAME)
    server = Server(program.__dict__)
    try:
        exec(compile(settings["source"], PROGRAM_FILE, "exec", dont_inherit=True), program.__dict__)
    except BaseException as error:  # a program that ends by SystemExit ends before its test
        server.broken_by = error
    server.channel.serve_forever()


class Callback:
    """A function of the test that the program was given."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have the test's process call it."""
        try:
            return self._server.channel.ask("call", self, args, kwargs)
        except RemoteError as error:
            raise error_from(error.description, {}) from None


class Server:
    """Does what the test asks; the program's `channel.Side`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.channel = Channel(4, 5, self)
        self.broken_by: BaseException | None = None
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def give(self, value: object) -> tuple[bytes, Any]:
        """A number for an object that stays here; it is kept, so that no other takes its place."""
        if isinstance(value, Callback):
            return OF_TEST, value.number
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return OF_PROGRAM, number

    def take(self, tag: bytes, content: Any) -> Any:
        """An object of the program's own, a function of the test's, or one of the standard library."""
        if tag == OF_PROGRAM:
            return self._objects[content]
        if tag == OF_TEST:
            return Callback(self, content)
        module, name = content
        __import__(module)
        return getattr(sys.modules[module], name)

    def serve(self, operation: str, target: Any, args: Any, kwargs: Any) -> Any:
        """What is replied to a request: the result, for calls with the arguments as they left them."""
        if self.broken_by is not None:
            raise self.broken_by
        if operation == "names":
            return {name: self._describe_name(name) for name in args if name in self._names}
        if operation != "call":
            return OPERATIONS[operation](target, *args)
        mutable = [isinstance(argument, (list, dict, set, bytearray)) for argument in args]
        before = encode(args, self.give) if any(mutable) else b""
        result = target(*args, **kwargs)
        is_changed = any(mutable) and encode(args, self.give) != before
        return result, args if is_changed else None

    def _describe_name(self, name: str) -> tuple[str, Any]:
        """What a name of the program stands for."""
        value = self._names[name]
        if isinstance(value, ModuleType) and value.__name__ == name:
            return "module", None
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == MODULE_NAME:
            return "exception", base_names(value)
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and getattr(sys.modules.get(module), name, None) is value and module != MODULE_NAME:
            return "member", module
        return "value", value

    def describe(self, error: BaseException) -> dict[str, Any]:
        """An exception of the program's."""
        return describe_error(error, PROGRAM_FILE)


def base_names(kind: type[BaseException]) -> list[str]:
    """The names of an exception's bases that are built in, the nearest first."""
    return [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]


def describe_error(error: BaseException, file: str) -> dict[str, Any]:
    """An exception as the other side can raise it again, with the last line of `file` that it went through."""
    try:
        text = str(error)[:MAX_TEXT]
    except Exception:
        text = ""
    return {
        "name": type(error).__name__,
        "bases": base_names(type(error)),
        "args": [value for value in error.args if value is None or type(value) in (bool, int, float, str)],
        "has_all_args": all(type(value) in (bool, int, float, str) for value in error.args),
        "text": text,
        "line": line_number(error.__traceback__, file) or getattr(error, "lineno", None),
        "errno": getattr(error, "errno", None),
    }


def line_number(traceback: TracebackType | None, file: str) -> int | None:
    """The last line of a file that an exception went through."""
    found = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            found = traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def error_from(description: dict[str, Any], known: dict[str, type[BaseException]]) -> BaseException:
    """The exception that was described, as the class of that name or the nearest built-in one."""
    kind = exception_class([description["name"], *description["bases"]], known)
    try:
        return kind(*description["args"]) if description["has_all_args"] else kind(description["text"])
    except Exception:  # one that wants other arguments, such as UnicodeDecodeError
        return Exception(f"{description['name']}: {description['text']}")


def exception_class(names: list[str], known: dict[str, type[BaseException]]) -> type[BaseException]:
    """The first of some names that is a known exception or a built-in one."""
    for name in names:
        kind = known.get(name) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return Exception


def _copy(value: Any) -> Any:
    import copy

    return copy.deepcopy(value)


# What a test may do with an object of the program but call it. No operand of these can be a value of the test, except
# for those that say where to look: see `remote`.
BETWEEN_TWO = (
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and_", "or_",
    "xor",
)  # fmt: skip
OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": _operator.getitem,
    "set_item": _operator.setitem,
    "delete_item": _operator.delitem,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "copy": _copy,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, other: issubclass(other, kind),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *_: type(value).__exit__(value, None, None, None),
    **{name: getattr(_operator, name) for name in BETWEEN_TWO},
}
