"""What goes between a program and its test as a copy, and what a program cannot make the other side do."""

from __future__ import annotations

import datetime
import math
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest

from tunebook.evaluate.sandbox.values import OF_PROGRAM, OF_TEST, decode, encode, restore

Pair = namedtuple("Pair", "left right")


class Color(IntEnum):
    red = 1


def give(value):
    return OF_PROGRAM, 7


def take(tag, content):
    return tag, content


def there_and_back(value):
    return decode(encode(value, give), take)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 255, 256, -(2**63), 2**5000, 0.1, -0.0, math.inf, "", "é\ud800\0", b"\0\xff",
        bytearray(b"x"), 1 - 2j, (), (1, (2,)), [], [[], {}], set(), {1, "a"}, frozenset({(1, 2)}), {}, {(1,): [2]},
        range(1, 9, 2), ..., NotImplemented, int, ValueError, list(range(-50, 50)), [0.5] * 99, set(range(40)),
        (2**70,) * 20, [True] * 20, [None, 1] * 20,
        Decimal("1.10"), Fraction(1, 3), deque([1, 2], maxlen=3), datetime.date(2024, 2, 29),
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.time(1, 2), datetime.timedelta(-1, 2, 3),
    ],
    ids=lambda value: type(value).__name__,  # not its text: a set is written in another order by each process
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_comes_back():
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Pair(1, [2]), (1, [2])),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (Color.red, 1),
        (type("Text", (str,), {"__eq__": lambda *_: True, "__hash__": str.__hash__})("x"), "x"),
    ],
    ids=repr,
)
def test_subclasses_go_as_the_plain_type(value, plain):
    back = there_and_back(value)
    assert back == plain
    assert type(back) is type(plain)


def test_everything_else_is_a_reference():
    assert there_and_back([object(), len, lambda: 1, Pair]) == [(OF_PROGRAM, 7)] * 4
    aware = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    assert there_and_back(aware) == (OF_PROGRAM, 7)


def sized(tag, content):
    return tag + struct.pack(">I", len(content)) + content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends in the middle"),
        (b"?", "is no tag"),
        (b"NN", "more than one value"),
        (sized(b"s", b"abc")[:-1], "ends in the middle"),
        (b"l" + struct.pack(">I", 2**32 - 1), "ends in the middle"),
        (b"m" + encode(["os", "_exit", [0]], give), r"os._exit is nothing that values are made of"),
        (b"m" + encode(["decimal", "getcontext", []], give), r"nothing that values are made of"),
        (sized(b"u", b"eval"), "eval is no type"),
        (sized(b"u", b"__import__"), "is no type"),
    ],
)
def test_what_nobody_writes_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        decode(content, take)


def test_references_are_told_apart():
    assert decode(OF_TEST + encode(3, give), take) == (OF_TEST, 3)


def test_arguments_are_changed_in_place():
    inner, text = [1], bytearray(b"a")
    old = [inner, {"k": inner}, {1}, text, 5]
    restore(old, [[1, 2], {"k": [3], "n": 0}, {2}, bytearray(b"bc"), 6, "more"])
    assert old[0] is inner
    assert old == [[3], {"k": [3], "n": 0}, {2}, bytearray(b"bc"), 6, "more"]
    restore(old, [[]])
    assert old == [[]]
