"""What goes between a program and its test as a copy, and what a program cannot make the other side do."""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import subprocess
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest

from tunebook.evaluate.sandbox.child import Checker, Peer, Remote, restore

Pair = namedtuple("Pair", "left right")


class Color(IntEnum):
    red = 1


@pytest.fixture(scope="module")
def ends():
    """A program's end of the connection, and its test's."""
    return Peer(io.BytesIO(), io.BytesIO()), Checker(io.BytesIO(), io.BytesIO())


@pytest.fixture(scope="module")
def there_and_back(ends):
    """What the test gets for a value of the program."""
    return lambda value: ends[1].decode(json.loads(json.dumps(ends[0].encode(value))))


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
def test_plain_values_come_back_as_they_were(value, there_and_back):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_comes_back(there_and_back):
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
def test_subclasses_go_as_the_plain_type(value, plain, there_and_back):
    back = there_and_back(value)
    assert back == plain
    assert type(back) is type(plain)


def test_everything_else_stays_where_it_is(there_and_back):
    aware = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    values = [object(), len, lambda: 1, Pair, aware, type("Any", (), {"__eq__": lambda *_: True})()]
    remotes = there_and_back(values)
    assert [type(remote) for remote in remotes] == [Remote] * 6
    assert there_and_back(values) == remotes  # the same objects again
    assert not any(remote == 42 or remote == 42 for remote in remotes)


@pytest.mark.parametrize(
    "message",
    [
        "?",
        '["reply"]',
        '["reply", {}]',
        '["reply", {"builtins.int": [1], "mine": 1}]',
        '["reply", {"os._exit": [0]}]',
        '["reply", {"builtins.eval": ["1"]}]',
        '["reply", {"builtins.type": ["Any", [], []]}]',
        '["reply", {"decimal.getcontext": []}]',
        '["reply", {"library": ["os", "_exit"]}]',
        '["reply", {"builtin": "eval"}]',
        '["reply", {"builtin": "__import__"}]',
        '["reply", {"builtin": "__loader__"}]',
        '["reply", {"builtin": "add"}]',
        '["reply", {"yours": 0}]',  # nothing was given
        '["reply", ' + "[" * 100_000,
    ],
)
def test_what_no_program_may_send_is_refused(message):
    with pytest.raises((ValueError, KeyError, IndexError, RecursionError)):
        Checker(io.BytesIO(message.encode() + b"\n"), io.BytesIO())._receive()


@pytest.mark.parametrize("target", [int, len, print, "x"])
def test_a_program_can_call_only_what_it_was_given(ends, target):
    with pytest.raises(AttributeError, match="a program can call what it was given, and nothing else"):
        ends[1].serve(target, (), {})


def test_arguments_are_changed_in_place():
    inner, text = [1], bytearray(b"a")
    old = [inner, {"k": inner}, {1}, text, 5]
    restore(old, [[1, 2], {"k": [3], "n": 0}, {2}, bytearray(b"bc"), 6, "more"])
    assert old[0] is inner
    assert old == [[3], {"k": [3], "n": 0}, {2}, bytearray(b"bc"), 6, "more"]
    restore(old, [[]])
    assert old == [[]]


def test_children_import_nothing_that_takes_long():
    code = "import sys; import tunebook.evaluate.sandbox.child; print(*sys.modules)"
    words = [sys.executable, "-S", "-c", code]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("src"))}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert not {"ast", "dataclasses", "inspect", "pathlib", "subprocess", "typing"} & set(done.stdout.split())
