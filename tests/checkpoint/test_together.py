"""How ranks share out files; what they tell each other is seen with two real ranks, in the system tests."""

from __future__ import annotations

import pytest

from tunebook.checkpoint.together import on_every_rank, on_first_rank, rank_and_size, share_of, tell_all

SIZES = {"a": 5, "b": 4, "c": 3, "d": 3, "empty": 0, "nothing": 0}


def test_each_file_is_one_ranks_and_the_loads_are_even() -> None:
    shares = [share_of(SIZES, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(SIZES)
    assert [sum(SIZES[name] for name in share) for share in shares] == [5, 4, 6]


def test_more_ranks_than_files() -> None:
    shares = [share_of({"a": 1}, rank, 3) for rank in range(3)]
    assert shares == [["a"], [], []]


def test_one_rank_is_all_ranks() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert rank_and_size() == (0, 1)
    assert tell_all(3) == [3]
    assert on_first_rank(lambda: 4) == 4
    assert on_every_rank(lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        on_every_rank(fail)
    with pytest.raises(ZeroDivisionError):
        on_first_rank(fail)
