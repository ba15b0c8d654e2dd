"""Child processes of a trial: `Solution` executes the program, `Checker` executes the test and decides.

They exchange lines of JSON over a pair of pipes. A side can only ask the other to call something. Calls may nest in
both directions, because a test may pass a function to the program. Plain data is copied; every other object is sent as
a number that refers to it. Copies have the plain types and never subclasses, so no value brings its own `__eq__`, and
neither side executes what it receives.

The solution's process is untrusted once the program has run, because the program may change anything in it. It knows
neither the test nor the nonce. The children get no other file of Tunebook. This file avoids `typing` and `ast`, because
their import time would delay every program.
"""

from __future__ import annotations

import _operator
import builtins
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

PROGRAM_FILE, TEST_FILE = "<program>", "<test>"
PROGRAM_MODULE = "solution"  # not `__main__`: as in code_eval, code under `if __name__ == "__main__"` does not run
CALL, REPLY, ERROR = "call", "reply", "error"
MINE, YOURS, BUILTIN, HEX = "mine", "yours", "builtin", "hex"  # tags of values that are not copied
MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT = 2000
MAX_DECIMAL_BITS = 8192  # Python refuses to write much longer integers in decimal
ModuleType = type(sys)

# Types that compare by value, with the constructor arguments that rebuild each value.
COPIED: dict[str, Callable[[Any], list[Any]]] = {
    **{f"builtins.{kind.__name__}": lambda value: [list(value)] for kind in (tuple, set, frozenset, bytes, bytearray)},
    "builtins.dict": lambda value: [[list(item) for item in dict.items(value)]],
    "builtins.complex": lambda value: [value.real, value.imag],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "uuid.UUID": lambda value: [str(value)],
}
# Subclasses of these, such as named tuples and counters, become the builtin type.
BASES = (list, tuple, dict, set, frozenset, bytes, bytearray, complex, range)
MUTABLE = (list, dict, set, bytearray)
# Builtins sent by name: types and constants in both directions, functions and operators only from test to program.
HARMLESS = {
    name: value
    for name, value in vars(builtins).items()
    if name[0] != "_" and (isinstance(value, type) or value is ... or value is NotImplemented)
}
OPERATORS = {
    name: getattr(_operator, name)
    for name in (
        "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and_", "or_",
        "xor",
    )
}  # fmt: skip
ITEMS = {name: getattr(_operator, name) for name in ("getitem", "setitem", "delitem")}
ALL = HARMLESS | {name: value for name, value in vars(builtins).items() if callable(value)} | OPERATORS | ITEMS


def main(settings: dict[str, Any]) -> None:
    """Run one of the two children. Stdin, which carried the settings, is replaced by an empty file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    read_from, write_to, *others = settings["pipes"]
    ends = open(read_from, "rb"), open(write_to, "wb")  # noqa: SIM115, PTH123  # open until this process ends
    if settings["role"] == "solution":
        Solution(*ends).run(settings["source"])
        return
    verdict = Checker(*ends).judge(settings["test"])
    os.write(others[0], json.dumps({"nonce": settings["nonce"], **verdict}).encode() + b"\n")
    os._exit(0)  # at once: the test may have left threads running


class ClosedError(BaseException):
    """The other side closed the connection. Not an Exception, because a test may expect and catch those."""


class Peer:
    """One end of the connection between a program and its test."""

    file = PROGRAM_FILE  # source file whose line numbers errors name
    gives = HARMLESS  # builtins that this side names
    takes = ALL  # builtins that the other side may name

    def __init__(self, read_from: BinaryIO, write_to: BinaryIO) -> None:
        self.is_closed = False
        self.exceptions: dict[str, type[BaseException]] = {}  # exception classes for errors from the other side
        self.objects: list[Any] = []  # objects the other side refers to by number; kept alive so that no id is reused
        self.numbers: dict[int, int] = {}  # id -> number
        self._names = {id(value): name for name, value in self.gives.items()}
        self._remotes: dict[int, Remote] = {}
        self._read_from = read_from
        self._write_to = write_to

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something on the other side and serve its calls until it replies.

        The other side's changes to mutable arguments are applied to the local ones. Raises: the call's own exception,
        ClosedError.
        """
        self._send(self._message(CALL, (target, args, kwargs)))
        while True:
            kind, content = self._receive()
            if kind == CALL:
                self._answer(content)
            elif kind == ERROR:
                raise error_from(content, self.exceptions)
            else:
                result, changed = content
                if changed is not None:
                    restore(list(args), list(changed))
                return result

    def serve(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the result of a call, and the arguments if the call changed them."""
        before = self.encode(args) if any(isinstance(argument, MUTABLE) for argument in args) else None
        result = target(*args, **kwargs)
        return result, args if before is not None and self.encode(args) != before else None

    def _answer(self, request: Any) -> None:
        try:
            message = self._message(REPLY, self.serve(*request))
        except ClosedError:
            raise
        except BaseException as error:
            message = self._message(ERROR, describe_error(error, self.file))
        self._send(message)

    def _message(self, kind: str, content: Any) -> bytes:
        message = json.dumps([kind, self.encode(content)]).encode() + b"\n"
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(message) >> 20} MiB is too large to be sent")
        return message

    def _send(self, message: bytes) -> None:
        try:
            self._write_to.write(message)
            self._write_to.flush()
        except BrokenPipeError:
            self._close()

    def _receive(self) -> tuple[str, Any]:
        line = self._read_from.readline(MAX_MESSAGE_BYTES + 1)
        if not line:
            self._close()
        kind, content = json.loads(line)
        return kind, self.decode(content)

    def _close(self) -> None:
        self.is_closed = True
        raise ClosedError

    def encode(self, value: Any) -> Any:
        """Encode a value as JSON: lists stay lists; anything JSON lacks becomes an object with one key."""
        if value is None or isinstance(value, (bool, float, str)):
            return value
        if isinstance(value, int):
            return value if int.bit_length(value) <= MAX_DECIMAL_BITS else {HEX: hex(value)}
        kind = type(value)
        if f"{kind.__module__}.{kind.__qualname__}" not in COPIED or getattr(value, "tzinfo", None) is not None:
            kind = next((base for base in BASES if isinstance(value, base)), object)
        if kind is list:
            return [self.encode(item) for item in value]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in COPIED:
            return {name: self.encode(COPIED[name](value))}
        if isinstance(value, Remote):
            return {YOURS: value._number}
        return {BUILTIN: self._names[id(value)]} if id(value) in self._names else {MINE: self.give(value)}

    def decode(self, value: Any) -> Any:
        """Decode what `encode` returned. Raises: ValueError and others for anything that `encode` never returns."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(tag, content)] = value.items()
        if tag in COPIED:
            module, _, name = tag.partition(".")
            return getattr(__import__(module), name)(*self.decode(content))
        if tag == MINE:
            return self._remotes.setdefault(content, Remote(self, content))
        if tag == BUILTIN:
            return self.takes[content]
        return int(content, 16) if tag == HEX else self.objects[{YOURS: content}[tag]]

    def give(self, value: Any) -> int:
        """Return the number by which the other side refers to an object."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number


class Remote:
    """Proxy for an object of the other side; forwards operations to it.

    In the test's process a proxy equals another object only if the program's own `==` says so about two of *its*
    objects. It is never compared or combined with a value of the test: that would show the program the right answer and
    trust its claim to be equal.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._peer.call(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.call(getattr, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.call(setattr, self, name, value)

    def __deepcopy__(self, memo: Any = None) -> Any:
        return self._peer.call(__import__, "copy").deepcopy(self)

    __copy__ = __deepcopy__

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.call(isinstance, value, self) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.call(issubclass, value, self) is True

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: object) -> None:
        self.__getattr__("__exit__")(None, None, None)


def _forward(function: Callable[..., Any], *, between_two: bool = False) -> None:
    def method(self: Remote, *args: Any) -> Any:
        if between_two and not isinstance(args[0], Remote):
            return NotImplemented
        return self._peer.call(function, self, *args)

    setattr(Remote, f"__{function.__name__.rstrip('_')}__", method)


for _function in (len, iter, next, bool, str, repr, hash, *ITEMS.values()):
    _forward(_function)
for _function in OPERATORS.values():
    _forward(_function, between_two=True)


class Shadow(Remote):
    """The program's object under a library module's name; its attributes are the real module's, as in `math.isclose`.

    Otherwise a program could supply its own `math`.
    """

    __slots__ = ("_module",)

    def __init__(self, remote: Remote, module: str) -> None:
        super().__init__(remote._peer, remote._number)
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        module = __import__(self._module)
        return getattr(module, name) if hasattr(module, name) else super().__getattr__(name)


def is_standard(module: object) -> bool:
    """Whether a module belongs to the standard library."""
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def describe_error(error: BaseException, file: str) -> dict[str, Any]:
    """Describe an exception so that the other side can raise it, with the last line of `file` in its traceback."""
    try:
        text = str(error)[:MAX_TEXT]
    except Exception:
        text = ""
    line, traceback = getattr(error, "lineno", None), error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    are_plain = all(value is None or type(value) in (bool, int, float, str) for value in error.args)
    return {
        "names": [type(error).__name__, *builtin_bases(type(error))],
        "args": list(error.args) if are_plain else [text],
        "text": text,
        "line": line,
        "errno": getattr(error, "errno", None),
    }


def builtin_bases(kind: type[BaseException]) -> list[str]:
    """The names of an exception's builtin bases, the nearest first."""
    return [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]


def error_from(description: dict[str, Any], known: dict[str, type[BaseException]]) -> BaseException:
    """Rebuild a described exception, as the class of that name or the nearest builtin one."""
    try:
        error = exception_class(description["names"], known)(*description["args"])
    except Exception:  # a class that takes other arguments, such as UnicodeDecodeError
        error = Exception(f"{description['names'][0]}: {description['text']}")
    error.description = description  # type: ignore[attr-defined]
    return error


def exception_class(names: list[str], known: dict[str, type[BaseException]]) -> type[BaseException]:
    """The first of some names that is a known exception or a builtin one."""
    for name in names:
        kind = known.get(name) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return Exception


def restore(old: Any, new: Any) -> Any:
    """Apply a call's changes on a copy to the original mutable value, recursively; return the new value."""
    kind = next((kind for kind in MUTABLE if isinstance(old, kind) and isinstance(new, kind)), None)
    if kind is None:
        return new
    if kind is list:
        old[:] = [restore(was, now) for was, now in zip(old, new, strict=False)] + new[len(old) :]
    elif kind is bytearray:
        old[:] = new
    else:
        new = {key: restore(old.get(key), now) for key, now in new.items()} if kind is dict else new
        old.clear()
        old.update(new)
    return old


class Solution(Peer):
    """Executes the program once, then makes the calls that the test asks for."""

    def __init__(self, read_from: BinaryIO, write_to: BinaryIO) -> None:
        super().__init__(read_from, write_to)
        module = sys.modules[PROGRAM_MODULE] = ModuleType(PROGRAM_MODULE)
        self._globals = module.__dict__
        self._error: BaseException | None = None
        self.give(self.describe_names)  # number 0: the test calls it first

    def run(self, source: str) -> None:
        """Execute the program and serve its test."""
        try:
            exec(compile(source, PROGRAM_FILE, "exec", dont_inherit=True), self._globals)
        except BaseException as error:  # including SystemExit: the program then ends before its test
            self._error = error
        try:
            while True:
                self._answer(self._receive()[1])
        except ClosedError:
            return

    def describe_names(self, names: list[str]) -> dict[str, tuple[str, Any]]:
        """Return which of the names the program defines, each with its kind. Raises: the program's own exception."""
        if self._error is not None:
            raise self._error
        return {name: self._describe(name, self._globals[name]) for name in names if name in self._globals}

    def _describe(self, name: str, value: Any) -> tuple[str, Any]:
        if isinstance(value, ModuleType) and value.__name__ == name:
            return "library", name
        module: Any = getattr(value, "__module__", None)
        if isinstance(value, type) and issubclass(value, BaseException) and module == PROGRAM_MODULE:
            return "exception", builtin_bases(value)
        is_library = is_standard(module) and getattr(sys.modules.get(module), name, None) is value
        return ("library", module) if is_library else ("value", value)


class Checker(Peer):
    """Executes the test and reports whether it completes. All decisions are made here."""

    file = TEST_FILE
    gives, takes = ALL, HARMLESS

    def judge(self, test: str) -> dict[str, Any]:
        """Return whether the test completes without an exception, or else why not."""
        try:
            names = names_of(test)
            code = compile(test, TEST_FILE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return {"status": "failed", "message": f"the test itself cannot be compiled: {error}"}
        try:
            exec(code, {"__name__": "test"} | self._names_for(names))
        except BaseException as error:  # as in code_eval, whatever the test raises is a failure
            if not self.is_closed:
                return {"status": "failed", **explain(error, test)}
        if self.is_closed:  # also if the test expected an exception and caught ClosedError
            return {"status": "gone", "message": "the program ended before its test did"}
        return {"status": "passed", "message": ""}

    def give(self, value: Any) -> int:
        """Return the number of a function of the test. Other objects cannot be sent to the program."""
        if not callable(value):
            raise TypeError(f"a test can hand plain data and functions to the program, not {type(value).__name__}")
        return super().give(value)

    def serve(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Serve the program's call of a function that the test gave it. The program can call nothing else here."""
        if id(target) not in self.numbers:
            # An AttributeError, because `functools` and `threading` ask functions for attributes and cope with their
            # absence.
            raise AttributeError("a program can call what it was given, and nothing else")
        return super().serve(target, args, kwargs)

    def _names_for(self, wanted: set[str]) -> dict[str, Any]:
        """Return the names that the test uses but does not define, as the program defines them.

        A builtin's name is taken from the program only if the test takes no other name from it, as in `assert sum(1, 2)
        == 3` with a program that defines `sum`. Otherwise a program could supply its own `abs` or `all`.
        """
        own = vars(builtins).keys()
        kinds = self.call(Remote(self, 0), sorted(wanted - own))
        if all(kind == "library" for kind, _ in kinds.values()):
            kinds |= self.call(Remote(self, 0), sorted(wanted & own))
        return {name: self._stand_in(name, *kinds[name]) for name in wanted & kinds.keys()}

    def _stand_in(self, name: str, kind: str, content: Any) -> Any:
        """Return the test's stand-in for one name of the program."""
        if kind == "value":
            return Shadow(content, name) if isinstance(content, Remote) and is_standard(name) else content
        if kind == "exception":
            return self.exceptions.setdefault(name, type(name, (exception_class(content, {}),), {}))
        # A library module or its member is passed by name, and only by its own name. `from x import helps as right`
        # therefore cannot reach this process.
        if not is_standard(content) or name.startswith("_"):
            raise ValueError(f"the program's {name} is not understood")
        __import__(content)
        return sys.modules[content] if name == content else getattr(sys.modules[content], name)


def names_of(test: str) -> set[str]:
    """Return the global names that a test uses but does not define. Raises: SyntaxError etc. if compiling fails."""
    import symtable

    top = symtable.symtable(test, TEST_FILE, "exec")
    used: set[str] = set()
    defined: set[str] = set()
    todo = [top]
    while todo:
        table = todo.pop()
        todo += table.get_children()
        symbols = [symbol for symbol in table.get_symbols() if table is top or symbol.is_global()]
        used |= {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
        defined |= {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return used - defined


def explain(error: BaseException, test: str) -> dict[str, Any]:
    """Describe an error and where it happened: in the program (if it came from there) and in the test."""
    here = describe_error(error, TEST_FILE)
    description, line = getattr(error, "description", here), here["line"]
    at = f" (program, line {description['line']})" if description is not here and description["line"] else ""
    if error.__traceback__ is not None and line is not None:
        lines = test.splitlines()
        at += f" (test, line {line}: {lines[line - 1].strip()[:200] if line <= len(lines) else ''})"
    name, text = description["names"][0], description["text"]
    return {"message": (f"{name}: {text}" if text else name) + at, "kind": name, "errno": description["errno"]}
