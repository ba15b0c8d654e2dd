"""Both child processes of a trial. `Solution` executes the program; `Checker` executes the test and decides.

The test reaches the program only through a pair of pipes, by lines of JSON. The one thing that either side can ask of
the other is to call something; calls may nest in both directions, because a test may hand a function to the program.
Plain data goes as a copy, everything else as a number that stands for it. Copies are of the plain types themselves and
never of subclasses: no value brings an `__eq__` of its own along, and nothing that arrives is executed.

The solution's process is not trusted once the program has run: the program may change anything in it. It knows neither
the test nor the nonce. This file is all that the children have of Tunebook. What it imports takes its time from every
program, so it does without `typing` and `ast`.
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
    from types import TracebackType
    from typing import Any, BinaryIO

PROGRAM_FILE, TEST_FILE = "<program>", "<test>"
PROGRAM_MODULE = "solution"  # not `__main__`: as in code_eval, what a program does only as a script is not executed
CALL, REPLY, ERROR = "call", "reply", "error"
MINE, YOURS, LIBRARY, HEX = "mine", "yours", "library", "hex"  # tags of what is no copy
MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT = 2000
MAX_DECIMAL_BITS = 8192  # Python refuses to write much longer integers in decimal
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
ModuleType = type(sys)

# Types that compare by value, with what each is made from again. Subclasses, such as named tuples and counters, go as
# the builtin type that they are.
COPIED: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.tuple": lambda value: [list(value)],
    "builtins.set": lambda value: [list(value)],
    "builtins.frozenset": lambda value: [list(value)],
    "builtins.dict": lambda value: [[list(item) for item in dict.items(value)]],
    "builtins.bytes": lambda value: [list(value)],
    "builtins.bytearray": lambda value: [list(value)],
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
BASES = (list, tuple, dict, set, frozenset, bytes, bytearray, complex, range)
MUTABLE = (list, dict, set, bytearray)
BETWEEN_TWO = (
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and_", "or_",
    "xor",
)  # fmt: skip


def main(settings: dict[str, Any]) -> None:
    """Be one of the two children. Stdin, which these settings came through, is empty from now on."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    read_from, write_to, *others = settings["pipes"]
    ends = open(read_from, "rb"), open(write_to, "wb")  # noqa: SIM115, PTH123  # open to the end of this process
    if settings["role"] == "solution":
        Solution(*ends).run(settings["source"])
        return
    verdict = Checker(*ends, TEST_FILE).judge(settings["test"])
    os.write(others[0], json.dumps({"nonce": settings["nonce"], **verdict}).encode() + b"\n")
    os._exit(0)  # at once: the test may have left threads behind


class ClosedError(BaseException):
    """The other side is gone. Not an Exception, which a test may expect and catch."""


class Peer:
    """One end of the connection between a program and its test."""

    def __init__(self, read_from: BinaryIO, write_to: BinaryIO, file: str) -> None:
        self.is_closed = False
        self.exceptions: dict[str, type[BaseException]] = {}  # classes for what the other side raises
        self.objects: list[Any] = []  # known to the other side by number; kept, so that no other gets their ids
        self.numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._read_from = read_from
        self._write_to = write_to
        self._file = file  # whose lines errors name

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something on the other side, and serve its calls meanwhile. Raises: what that raised, ClosedError.

        What is done to mutable arguments there is done to these.
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
        """The result of a call, and the arguments if it changed them."""
        before = self.encode(args) if any(isinstance(argument, MUTABLE) for argument in args) else None
        result = target(*args, **kwargs)
        return result, args if before is not None and self.encode(args) != before else None

    def _answer(self, request: Any) -> None:
        try:
            message = self._message(REPLY, self.serve(*request))
        except ClosedError:
            raise
        except BaseException as error:
            message = self._message(ERROR, describe_error(error, self._file))
        self._send(message)

    def _message(self, kind: str, content: Any) -> bytes:
        message = json.dumps([kind, self.encode(content)]).encode() + b"\n"
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(message) >> 20} MiB is too large to be handed over")
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
        """A value as JSON: lists as they are, and an object with one key for all that JSON lacks."""
        if value is None or isinstance(value, (bool, float, str)):
            return value
        if isinstance(value, int):
            return value if int.bit_length(value) <= MAX_DECIMAL_BITS else {HEX: hex(value)}
        kind = type(value)
        if f"{kind.__module__}.{kind.__qualname__}" not in COPIED or getattr(value, "tzinfo", None) is not None:
            kind = next((base for base in BASES if isinstance(value, base)), object)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name == "builtins.list":
            return [self.encode(item) for item in value]
        if isinstance(value, Remote):
            return {YOURS: value._number}
        tag, content = (name, COPIED[name](value)) if name in COPIED else self.give(value)
        return {tag: self.encode(content)}

    def decode(self, value: Any) -> Any:
        """The value that `encode` had. Raises: ValueError and others for what `encode` never returns."""
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
        if tag == LIBRARY:
            return self.take_library(*content)
        return int(content, 16) if tag == HEX else self.objects[{YOURS: content}[tag]]

    def give(self, value: Any) -> tuple[str, Any]:
        """A tag and content for an object that is not copied: a builtin type or constant, or a number."""
        library = library_name(value)
        if library is not None and is_builtin(value, *library):
            return LIBRARY, library
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return MINE, number

    def take_library(self, module: str, name: str) -> Any:
        """A member of the standard library that the other side names."""
        __import__(module)
        return getattr(sys.modules[module], name)


class Remote:
    """Stands for an object of the other side; what is done with it is done there.

    In the test's process it is equal to nothing but what the program's own `==` says about two of *its* objects. It is
    never compared or combined with a value of the test: that would tell the program the right answer, and take its word
    for being equal to it.
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
        return self._peer.call(__import__("copy").deepcopy, self)

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


for _function in (len, iter, next, bool, str, repr, hash, _operator.getitem, _operator.setitem, _operator.delitem):
    _forward(_function)
for _name in BETWEEN_TWO:
    _forward(getattr(_operator, _name), between_two=True)


def library_name(value: object) -> list[str] | None:
    """The module and the name of a member of the standard library; None for everything else."""
    if value is ... or value is NotImplemented:
        return ["builtins", "Ellipsis" if value is ... else "NotImplemented"]
    module: Any = getattr(value, "__module__", None)
    name: Any = getattr(value, "__name__", None) if is_standard(module) else None
    is_found = isinstance(name, str) and getattr(sys.modules.get(module), name, None) is value
    return [module, name] if is_found else None


def is_standard(module: object) -> bool:
    """Whether a module is the standard library's."""
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def is_builtin(value: object, module: str, name: str) -> bool:
    """Whether a value is a builtin type or constant, and has this name."""
    is_allowed = isinstance(value, type) or value is ... or value is NotImplemented
    return is_allowed and module == "builtins" and getattr(builtins, name, None) is value


def describe_error(error: BaseException, file: str) -> dict[str, Any]:
    """An exception as the other side can raise it again, with the last line of `file` that it went through."""
    try:
        text = str(error)[:MAX_TEXT]
    except Exception:
        text = ""
    are_plain = all(value is None or type(value) in (bool, int, float, str) for value in error.args)
    return {
        "names": [type(error).__name__, *builtin_bases(type(error))],
        "args": list(error.args) if are_plain else [text],
        "text": text,
        "line": line_number(error.__traceback__, file) or getattr(error, "lineno", None),
        "errno": getattr(error, "errno", None),
    }


def builtin_bases(kind: type[BaseException]) -> list[str]:
    """The names of an exception's builtin bases, the nearest first."""
    return [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]


def line_number(traceback: TracebackType | None, file: str) -> int | None:
    """The last line of a file that an exception went through."""
    found = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            found = traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def error_from(description: dict[str, Any], known: dict[str, type[BaseException]]) -> BaseException:
    """The exception that was described, as the class of that name or the nearest builtin one."""
    try:
        error = exception_class(description["names"], known)(*description["args"])
    except Exception:  # one that wants other arguments, such as UnicodeDecodeError
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
    """Change a mutable value in place into what a call made of it, down to what it holds; returns what stands there."""
    kind = next((kind for kind in MUTABLE if isinstance(old, kind) and isinstance(new, kind)), None)
    if kind is None:
        return new
    if kind is list:
        old[:] = [restore(was, now) for was, now in zip(old, new, strict=False)] + new[len(old) :]
    elif kind is dict:
        merged = {key: restore(old.get(key), now) for key, now in new.items()}
        old.clear()
        old.update(merged)
    elif kind is set:
        old.clear()
        old.update(new)
    else:
        old[:] = new
    return old


class Solution(Peer):
    """Executes the program once, then calls what the test asks for."""

    def __init__(self, read_from: BinaryIO, write_to: BinaryIO) -> None:
        super().__init__(read_from, write_to, PROGRAM_FILE)
        module = sys.modules[PROGRAM_MODULE] = ModuleType(PROGRAM_MODULE)
        self._names = module.__dict__
        self._broken_by: BaseException | None = None
        self.give(self.describe_names)  # number 0: how the test begins

    def run(self, source: str) -> None:
        """Execute the program and serve its test."""
        try:
            exec(compile(source, PROGRAM_FILE, "exec", dont_inherit=True), self._names)
        except BaseException as error:  # a program that ends by SystemExit ends before its test
            self._broken_by = error
        try:
            while True:
                self._answer(self._receive()[1])
        except ClosedError:
            return

    def describe_names(self, names: list[str]) -> dict[str, tuple[str, Any]]:
        """Those of the names that the program defines, with what each stands for. Raises: what the program raised."""
        if self._broken_by is not None:
            raise self._broken_by
        return {name: self._describe(name, self._names[name]) for name in names if name in self._names}

    def _describe(self, name: str, value: Any) -> tuple[str, Any]:
        if isinstance(value, ModuleType) and value.__name__ == name:
            return "module", None
        module = getattr(value, "__module__", None)
        if isinstance(value, type) and issubclass(value, BaseException) and module == PROGRAM_MODULE:
            return "exception", builtin_bases(value)
        library = library_name(value)
        return ("member", library[0]) if library is not None and library[1] == name else ("value", value)


class Checker(Peer):
    """Executes the test and says whether it comes to its end. What decides is computed here."""

    def judge(self, test: str) -> dict[str, Any]:
        """Whether the test comes to its end without an exception, and otherwise why not."""
        try:
            tree = compile(test, TEST_FILE, "exec", ONLY_AST, dont_inherit=True)
            code = compile(tree, TEST_FILE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return {"status": "failed", "message": f"the test itself cannot be compiled: {error}"}
        try:
            exec(code, {"__name__": "test"} | self._names_for(tree))
        except BaseException as error:  # as in code_eval, whatever the test raises is a failure
            if not self.is_closed:
                return {"status": "failed", **explain(error, test)}
        if self.is_closed:  # also where the test expected an exception and caught this one
            return {"status": "gone", "message": "the program ended before its test did"}
        return {"status": "passed", "message": ""}

    def give(self, value: Any) -> tuple[str, Any]:
        """What can be handed to the program: members of the standard library by name, and functions of the test."""
        library = library_name(value)
        if library is not None:
            return LIBRARY, library
        if not callable(value):
            raise TypeError(f"a test can hand plain data and functions to the program, not {type(value).__name__}")
        return super().give(value)

    def take_library(self, module: str, name: str) -> Any:
        """A builtin type or constant: a program hands over nothing else but its own objects."""
        value = getattr(builtins, name, None)
        if not is_builtin(value, module, name):
            raise ValueError(f"{module}.{name} is no builtin type")
        return value

    def serve(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The program calls a function that the test gave it. It can call nothing else here."""
        if id(target) not in self.numbers:
            # An AttributeError, because `functools` and `threading` ask functions for attributes, and go on without.
            raise AttributeError("a program can call what it was given, and nothing else")
        return super().serve(target, args, kwargs)

    def _names_for(self, tree: Any) -> dict[str, Any]:
        """What the test gets from the program: the names that it uses and does not define.

        A name of Python's own is taken from the program only where the test takes no other, as in `assert sum(1, 2) ==
        3` with a program that defines `sum`. Otherwise a program could bring its own `abs` or `all` along.
        """
        wanted, only_dotted = names_of(tree)
        own = set(dir(builtins))
        found = self._names(sorted(wanted - own))
        for name in only_dotted & found.keys() & sys.stdlib_module_names:  # as in `math.isclose`
            found[name] = __import__(name)
        are_libraries = [isinstance(value, ModuleType) or library_name(value) is not None for value in found.values()]
        return found | self._names(sorted(wanted & own)) if all(are_libraries) else found

    def _names(self, names: list[str]) -> dict[str, Any]:
        described = Remote(self, 0)(names)
        return {name: self._stand_in(name, *described[name]) for name in names if name in described}

    def _stand_in(self, name: str, kind: str, content: Any) -> Any:
        """What the test gets for a name of the program."""
        if kind == "value":
            return content
        if kind == "exception":
            return self.exceptions.setdefault(name, type(name, (exception_class(content, {}),), {}))
        # A module or one of its members goes by name, and by its own name only: `from x import helps as right` is no
        # way into this process.
        module = name if kind == "module" else content
        if not is_standard(module) or name.startswith("_"):
            raise ValueError(f"the program's {name} is not understood")
        return __import__(name) if kind == "module" else super().take_library(module, name)


def names_of(tree: Any) -> tuple[set[str], set[str]]:
    """The names that some code uses and does not define, and those that it uses only as in `name.attribute`."""
    bare: set[str] = set()
    dotted: set[str] = set()
    defined: set[str] = set()
    todo = [(tree, "")]  # nodes of the syntax tree, each with the kind of its parent
    while todo:
        node, parent = todo.pop()
        kind = type(node).__name__
        if kind == "Name" and type(node.ctx).__name__ == "Load":
            (dotted if parent == "Attribute" else bare).add(node.id)
        elif kind == "Name":
            defined.add(node.id)
        elif kind in ("FunctionDef", "AsyncFunctionDef", "ClassDef", "ExceptHandler") and node.name:
            defined.add(node.name)
        elif kind == "arg":
            defined.add(node.arg)
        elif kind == "alias":
            defined.add(node.asname or node.name.partition(".")[0])
        for name in node._fields:
            value = getattr(node, name, None)
            children = value if isinstance(value, list) else [value]
            todo += [(child, kind) for child in children if hasattr(child, "_fields")]
    return (bare | dotted) - defined, dotted - bare


def explain(error: BaseException, test: str) -> dict[str, Any]:
    """What went wrong, and where: in the program if it came from there, and in the test."""
    description = getattr(error, "description", None)
    at = f" (program, line {description['line']})" if description and description["line"] else ""
    description = description or describe_error(error, TEST_FILE)
    line = line_number(error.__traceback__, TEST_FILE)
    if line is not None:
        lines = test.splitlines()
        at += f" (test, line {line}: {lines[line - 1].strip()[:200] if line <= len(lines) else ''})"
    name, text = description["names"][0], description["text"]
    return {"message": (f"{name}: {text}" if text else name) + at, "kind": name, "errno": description["errno"]}
