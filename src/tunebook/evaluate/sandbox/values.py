"""Values on their way between a program and its test: plain data goes as a copy, everything else as a reference.

A format of our own: unpickling would let a program execute code in the process that judges it, and importing `json` or
`typing` takes as long as all else that a child does before its program starts. Copies are of the plain types themselves
and never of subclasses, so that no value brings an `__eq__` of its own along: a program cannot answer with something
that is equal to everything.

Each value is a tag of one byte, for most followed by a length or count of four, and then by its content.
"""

from __future__ import annotations

import builtins
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Give = Callable[[object], tuple[bytes, Any]]  # a tag of REFERENCES and its content, for what is no plain data
    Take = Callable[[bytes, Any], Any]  # what such a tag and content stand for

# An object of the program's process, one of the test's, and one of the standard library.
OF_PROGRAM, OF_TEST, OF_LIBRARY = b"p", b"q", b"g"
REFERENCES = (OF_PROGRAM, OF_TEST, OF_LIBRARY)

# Types of the standard library that compare by value, with what they are made of again.
MADE_FROM: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("collections", "deque"): lambda value: [list(value), value.maxlen],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "time"): lambda value: [value.hour, value.minute, value.second, value.microsecond],
    ("datetime", "datetime"): lambda value: [*value.timetuple()[:6], value.microsecond],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("uuid", "UUID"): lambda value: [str(value)],
}
# Subclasses, such as named tuples, counters and Enums of integers, go as the first of these that they are.
KINDS = (int, str, float, list, tuple, dict, set, frozenset, bytes, bytearray, complex, range)
COLLECTIONS: dict[bytes, Any] = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}
TAGS: dict[Any, bytes] = {kind: tag for tag, kind in COLLECTIONS.items()}
BULK = 16  # from here on lists of nothing but integers or floats go in one piece
SIZE = struct.Struct(">I")
DOUBLE = struct.Struct(">d")


def encode(value: Any, give: Give) -> bytes:
    """A value as bytes."""
    parts: list[bytes] = []
    _encode(value, give, parts.append)
    return b"".join(parts)


def _encode(value: Any, give: Give, write: Callable[[bytes], None]) -> None:
    if value is None or value is True or value is False:
        write({None: b"N", True: b"T", False: b"F"}[value])
        return
    kind = type(value)
    if kind not in KINDS:
        kind = next((base for base in KINDS if isinstance(value, base)), kind)
    if kind is int:
        _sized(b"i", int.to_bytes(value, int.bit_length(value) // 8 + 1, "big", signed=True), write)
    elif kind is float:
        write(b"d" + DOUBLE.pack(value))
    elif kind is str:
        _sized(b"s", str.encode(value, "utf-8", "surrogatepass"), write)
    elif kind in (list, tuple, set, frozenset):
        _encode_items(TAGS[kind], kind(value), give, write)
    elif kind is dict:
        write(b"D" + SIZE.pack(dict.__len__(value)))
        for pair in dict.items(value):
            for part in pair:
                _encode(part, give, write)
    elif kind in (bytes, bytearray):
        _sized(b"b" if kind is bytes else b"B", bytes(value), write)
    elif kind is complex:
        write(b"c" + DOUBLE.pack(value.real) + DOUBLE.pack(value.imag))
    elif kind is range:
        write(b"r")
        _encode((value.start, value.stop, value.step), give, write)
    else:
        _encode_other(value, give, write)


def _sized(tag: bytes, content: bytes, write: Callable[[bytes], None]) -> None:
    write(tag + SIZE.pack(len(content)) + content)


def _encode_items(tag: bytes, items: Any, give: Give, write: Callable[[bytes], None]) -> None:
    kinds = set(map(type, items)) if len(items) >= BULK else set()
    if kinds == {int}:
        text = ",".join(map(hex, items)).encode()
        _sized(b"I" + tag, text, write)
    elif kinds == {float}:
        _sized(b"G" + tag, struct.pack(f">{len(items)}d", *items), write)
    else:
        write(tag + SIZE.pack(len(items)))
        for item in items:
            _encode(item, give, write)


def _encode_other(value: Any, give: Give, write: Callable[[bytes], None]) -> None:
    name = builtin_name(value)
    made_from = MADE_FROM.get((type(value).__module__, type(value).__qualname__))
    if name is not None:
        _sized(b"u", name.encode(), write)
    elif made_from is not None and getattr(value, "tzinfo", None) is None:
        write(b"m")
        _encode([type(value).__module__, type(value).__qualname__, made_from(value)], give, write)
    else:
        tag, content = give(value)
        write(tag)
        _encode(content, give, write)


def builtin_name(value: object) -> str | None:
    """The name of a builtin type or constant; None for everything else."""
    if value is ... or value is NotImplemented:
        return "Ellipsis" if value is ... else "NotImplemented"
    name = value.__name__ if isinstance(value, type) else ""
    return name if name and getattr(builtins, name, None) is value else None


def decode(content: bytes, take: Take) -> Any:
    """The value that `encode` had. Raises: ValueError and others for bytes that `encode` never writes."""
    reader = _Reader(content, take)
    value = reader.value()
    if reader.at != len(content):
        raise ValueError("there is more than one value")
    return value


class _Reader:
    """Reads one value after the other."""

    def __init__(self, content: bytes, take: Take) -> None:
        self._content = content
        self._take = take
        self.at = 0

    def _next(self, size: int) -> bytes:
        part = self._content[self.at : self.at + size]
        if len(part) != size:
            raise ValueError("it ends in the middle of a value")
        self.at += size
        return part

    def _sized(self) -> bytes:
        return self._next(SIZE.unpack(self._next(4))[0])

    def _doubles(self, count: int) -> tuple[float, ...]:
        return struct.unpack(f">{count}d", self._next(8 * count))

    def _several(self) -> Iterable[Any]:
        return (self.value() for _ in range(SIZE.unpack(self._next(4))[0]))

    def value(self) -> Any:
        """The next value."""
        tag = self._next(1)
        if tag in COLLECTIONS:
            return COLLECTIONS[tag](self._several())
        if tag in REFERENCES:
            return self._take(tag, self.value())
        if tag not in DECODERS:
            raise ValueError(f"{tag!r} is no tag")
        return DECODERS[tag](self)

    def dictionary(self) -> dict[Any, Any]:
        """A dictionary: keys and values in turn."""
        return {self.value(): self.value() for _ in range(SIZE.unpack(self._next(4))[0])}

    def integers(self) -> Any:
        """A collection of integers in one piece."""
        kind = COLLECTIONS[self._next(1)]
        return kind([int(item, 16) for item in self._sized().split(b",")])

    def floats(self) -> Any:
        """A collection of floats in one piece."""
        kind = COLLECTIONS[self._next(1)]
        content = self._sized()
        return kind(struct.unpack(f">{len(content) // 8}d", content))

    def made(self) -> Any:
        """A value of the standard library."""
        module, name, arguments = self.value()
        if (module, name) not in MADE_FROM:
            raise ValueError(f"{module}.{name} is nothing that values are made of")
        return getattr(__import__(module), name)(*arguments)

    def builtin(self) -> Any:
        """A builtin type or constant."""
        name = self._sized().decode()
        value = getattr(builtins, name)
        if builtin_name(value) != name:
            raise ValueError(f"{name} is no type")
        return value


DECODERS: dict[bytes, Callable[[Any], Any]] = {
    b"N": lambda reader: None,
    b"T": lambda reader: True,
    b"F": lambda reader: False,
    b"i": lambda reader: int.from_bytes(reader._sized(), "big", signed=True),
    b"d": lambda reader: reader._doubles(1)[0],
    b"c": lambda reader: complex(*reader._doubles(2)),
    b"s": lambda reader: reader._sized().decode("utf-8", "surrogatepass"),
    b"b": lambda reader: reader._sized(),
    b"B": lambda reader: bytearray(reader._sized()),
    b"r": lambda reader: range(*reader.value()),
    b"D": _Reader.dictionary,
    b"I": _Reader.integers,
    b"G": _Reader.floats,
    b"m": _Reader.made,
    b"u": _Reader.builtin,
}


def restore(old: Any, new: Any) -> None:
    """Change a mutable argument in place into what the program made of it; what it holds stays the same object."""
    if isinstance(old, list) and isinstance(new, list):
        kept = [_restored(was, now) for was, now in zip(old, new, strict=False)]
        old[:] = kept + new[len(kept) :]
    elif isinstance(old, dict) and isinstance(new, dict):
        merged = {key: _restored(old.get(key), now) for key, now in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new


def _restored(was: Any, now: Any) -> Any:
    if type(was) is type(now) and isinstance(was, (list, dict, set, bytearray)):
        restore(was, now)
        return was
    return now
