"""How ranks divide files; the system tests run the collectives on two real ranks."""

from __future__ import annotations

import pytest

from tunebook.checkpoint.collectives import (
    background_group,
    on_every_rank,
    on_first_rank,
    rank_and_size,
    share_of,
)

SIZES = {"a": 5, "b": 4, "c": 3, "d": 3, "empty": 0, "nothing": 0}


def test_each_file_is_one_ranks() -> None:
    shares = [share_of(SIZES, rank, 3) for rank in range(3)]
    assert shares == [["a", "d"], ["b", "empty"], ["c", "nothing"]]
    assert [share_of({"a": 1}, rank, 3) for rank in range(3)] == [["a"], [], []]


def test_one_rank_is_all_ranks() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert rank_and_size() == (0, 1)
    assert background_group(1) is None
    assert on_first_rank(lambda: 4) == 4
    assert on_every_rank(lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        on_every_rank(fail)
    with pytest.raises(ZeroDivisionError):
        on_first_rank(fail)
