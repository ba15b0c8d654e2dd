"""What the ranks of a run tell each other around a checkpoint, and how they share out its files. One rank is all ranks.

Every function here that talks is a collective: each rank calls it, in the same order. So what talks in a thread beside
the training needs a group of its own, or its words would be taken for the training's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch.distributed

from tunebook.errors import TunebookError

Group: TypeAlias = "torch.distributed.ProcessGroup | None"  # None: the one that training uses
Answer = TypeVar("Answer")


def rank_and_size() -> tuple[int, int]:
    """This rank, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def group_apart(timeout_s: float) -> Group:
    """A group of all ranks that a thread beside the training can talk in, over the hosts' network; a collective.

    One rank needs none. `timeout_s` is how long a rank waits for the others. Raises: TunebookError where gloo, unlike
    what training uses, does not get through.
    """
    if rank_and_size()[1] == 1:
        return None
    try:
        made: Group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return made
    except Exception as error:
        raise TunebookError(
            f"the ranks cannot talk to each other beside the training, over gloo: {str(error).splitlines()[0]}. Name "
            "the network interface between the nodes with GLOO_SOCKET_IFNAME, or let training stand still for its "
            "saves: training.save_in_background=false",
            problem_id="no-talk-beside-training",
        ) from error


def tell_all(value: Answer, group: Group = None) -> list[Answer]:
    """Every rank's value, in the order of ranks."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def on_first_rank(work: Callable[[], Answer], group: Group = None) -> Answer:
    """What the first rank's work returned, on every rank. Raises: what it raised, on every rank."""
    rank, size = rank_and_size()
    if size == 1:
        return work()
    said: list[Any] = [None]
    if rank == 0:
        said = [_attempt(work)]
    torch.distributed.broadcast_object_list(said, src=0, group=group)
    result, error = said[0]
    if error is not None:
        raise error
    answer: Answer = result
    return answer


def on_every_rank(work: Callable[[], Answer], group: Group = None) -> list[Answer]:
    """What the work of each rank returned, on every rank. Raises: the first rank's error, on every rank."""
    ended: list[tuple[Any, Exception | None]] = tell_all(_attempt(work), group)
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
