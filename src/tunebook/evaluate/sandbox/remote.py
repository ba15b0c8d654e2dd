"""The test's view of what the program's process holds: objects that stand for objects over there. Part of the checker.

What decides a test is computed here: a value that comes back is plain data, and an object of the program is equal to
nothing but what the program's own `==` says about two of *its* objects. It is never compared or combined with a value
of the test, for that would tell the program the right answer and take its word for being equal to it.
"""

from __future__ import annotations

import sys

from tunebook.evaluate.sandbox.channel import Channel, RemoteError
from tunebook.evaluate.sandbox.solution import BETWEEN_TWO, describe_error, error_from, exception_class
from tunebook.evaluate.sandbox.values import OF_LIBRARY, OF_PROGRAM, OF_TEST, restore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TEST_FILE = "<test>"


class ProgramObject:
    """Stands for one object of the program."""

    __slots__ = ("_number", "_session")

    def __init__(self, session: Session, number: int) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._session.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._session.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._session.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._session.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._session.ask("set_item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._session.ask("delete_item", self, key)

    def __len__(self) -> int:
        return int(self._session.ask("len", self))

    def __iter__(self) -> Any:
        return self._session.ask("iter", self)

    def __next__(self) -> Any:
        return self._session.ask("next", self)

    def __bool__(self) -> bool:
        return self._session.ask("bool", self) is True

    def __str__(self) -> str:
        return str.__str__(self._session.ask("str", self))

    def __repr__(self) -> str:
        return str.__str__(self._session.ask("repr", self))

    def __hash__(self) -> int:
        return int(self._session.ask("hash", self))

    def __copy__(self) -> Any:
        return self._session.ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._session.ask("copy", self)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, ProgramObject) and self._session.ask("isinstance", self, value) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, ProgramObject) and self._session.ask("issubclass", self, value) is True

    def __enter__(self) -> Any:
        return self._session.ask("enter", self)

    def __exit__(self, *error: object) -> None:
        self._session.ask("exit", self)


def _between_two(name: str) -> Callable[[ProgramObject, object], Any]:
    def operation(self: ProgramObject, other: object) -> Any:
        return self._session.ask(name, self, other) if isinstance(other, ProgramObject) else NotImplemented

    return operation


for _name in BETWEEN_TWO:
    setattr(ProgramObject, f"__{_name.rstrip('_')}__", _between_two(_name))


class Session:
    """The test's end of the channel; its `channel.Side`."""

    def __init__(self, read_from: int, write_to: int) -> None:
        self._channel = Channel(read_from, write_to, self)
        self._objects: dict[int, ProgramObject] = {}
        self._given: list[Any] = []
        self._exceptions: dict[str, type[BaseException]] = {}

    @property
    def is_closed(self) -> bool:
        """Whether the program ended. It stays so, whatever the test made of the exception that said it."""
        return self._channel.is_closed

    def names(self, names: list[str]) -> dict[str, Any]:
        """Those of the names that the program defines, with what the test gets for each.

        Raises: what the program raised when it was executed.
        """
        described = self._request("names", None, names, {})
        return {name: self._stand_in(name, *described[name]) for name in names if name in described}

    def call(self, target: ProgramObject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the program; what it does to mutable arguments is done to the test's own."""
        result, changed = self._request("call", target, args, kwargs)
        if changed is not None:
            restore(list(args), list(changed))
        return result

    def ask(self, operation: str, target: ProgramObject, *args: Any) -> Any:
        """Do something else with an object of the program."""
        return self._request(operation, target, args, {})

    def give(self, value: object) -> tuple[bytes, Any]:
        """An object of the program's own, or a function of the test's: nothing else can be handed to the program."""
        if isinstance(value, ProgramObject):
            return OF_PROGRAM, value._number
        if isinstance(value, (type, type(len))) and is_standard(value.__module__):
            return OF_LIBRARY, (value.__module__, value.__name__)
        if callable(value):
            self._given.append(value)
            return OF_TEST, len(self._given) - 1
        raise TypeError(f"a test can hand plain data and functions to the program, not {type(value).__name__}")

    def take(self, tag: bytes, content: Any) -> Any:
        """One of the program's objects, or a function that it was given."""
        if tag == OF_PROGRAM:
            return self._objects.setdefault(content, ProgramObject(self, content))
        if tag == OF_TEST:
            return self._given[content]
        raise ValueError("a program hands over its own objects only")

    def serve(self, operation: str, target: Any, args: Any, kwargs: Any) -> Any:
        """The program calls a function that the test gave it. Nothing else can be asked of this side."""
        if operation != "call" or not any(target is given for given in self._given):
            raise ValueError("a program can call what it was given, and nothing else")
        return target(*args, **kwargs)

    def describe(self, error: BaseException) -> dict[str, Any]:
        """An exception of the test's."""
        return describe_error(error, TEST_FILE)

    def _request(self, operation: str, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._channel.ask(operation, target, args, kwargs)
        except RemoteError as remote:
            error = error_from(remote.description, self._exceptions)
            error.program_error = remote.description  # type: ignore[attr-defined]
        raise error

    def _stand_in(self, name: str, kind: str, content: Any) -> Any:
        """What the test gets for a name of the program."""
        if kind == "value":
            return content
        if kind == "exception":
            self._exceptions[name] = type(name, (exception_class(content, {}),), {})
            return self._exceptions[name]
        # A module or one of its members goes by name, and by its own name only: `from x import helps as right` is no
        # way into this process.
        if kind == "module" and is_standard(name):
            return _import(name)
        if kind == "member" and is_standard(content) and not name.startswith("_"):
            return getattr(_import(content), name)
        raise ValueError(f"the program's {name} is not understood")


def is_standard(module: object) -> bool:
    """Whether a module is the standard library's."""
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def _import(module: str) -> Any:
    __import__(module)
    return sys.modules[module]
