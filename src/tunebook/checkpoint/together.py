"""What the ranks of a run tell each other around a checkpoint, and how they share out its files. One rank is all ranks.

Every function here that talks is a collective: each rank calls it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed

Answer = TypeVar("Answer")


def rank_and_size() -> tuple[int, int]:
    """This rank, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def tell_all(value: Answer) -> list[Answer]:
    """Every rank's value, in the order of ranks."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    torch.distributed.all_gather_object(values, value)
    return values


def on_first_rank(work: Callable[[], Answer]) -> Answer:
    """What the first rank's work returned, on every rank. Raises: what it raised, on every rank."""
    rank, size = rank_and_size()
    if size == 1:
        return work()
    said: list[Any] = [None]
    if rank == 0:
        said = [_attempt(work)]
    torch.distributed.broadcast_object_list(said, src=0)
    result, error = said[0]
    if error is not None:
        raise error
    answer: Answer = result
    return answer


def on_every_rank(work: Callable[[], Answer]) -> list[Answer]:
    """What the work of each rank returned, on every rank. Raises: the first rank's error, on every rank."""
    ended: list[tuple[Any, Exception | None]] = tell_all(_attempt(work))
    for _, error in ended:
        if error is not None:
            raise error
    return [result for result, _ in ended]


def share_of(sizes: Mapping[str, int], rank: int, num_ranks: int) -> list[str]:
    """The files that one rank reads, of all: the largest are dealt out first, each to who has least so far."""
    loads = [0] * num_ranks
    mine: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1  # of empty files each rank gets some, too
        if least == rank:
            mine.append(name)
    return mine


def _attempt(work: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """An error as a value, since one that only one rank raises would leave the others waiting."""
    try:
        return work(), None
    except Exception as error:
        return None, error
