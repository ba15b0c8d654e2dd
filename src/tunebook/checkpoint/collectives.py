"""Collectives of Python values around a checkpoint, and the division of its files among the ranks.

Every rank calls a collective, in the same order; with one rank it is a plain call. A background thread needs its own
group, or its messages would mix with those of the training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tunebook.errors import TunebookError, first_line

if TYPE_CHECKING:
    import torch.distributed

Group: TypeAlias = "torch.distributed.ProcessGroup | None"  # None: the group of the training
Answer = TypeVar("Answer")


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks."""
    distributed: Any = sys.modules.get("torch.distributed")  # the launcher does without torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def background_group(timeout_s: float) -> Group:
    """A gloo group of all ranks for a background thread; None for one rank. A collective.

    `timeout_s` is how long a rank waits for the others. Raises: TunebookError if gloo cannot connect the hosts.
    """
    if rank_and_size()[1] == 1:
        return None
    import torch.distributed

    try:
        group: Group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return group
    except Exception as error:
        raise TunebookError(
            f"the ranks cannot connect over gloo, which saving in the background needs: {first_line(error)}. "
            "Name the network interface between the nodes with GLOO_SOCKET_IFNAME, or let training wait for its "
            "saves: training.save_in_background=false",
            problem_id="no-talk-beside-training",
        ) from error


def on_first_rank(work: Callable[[], Answer], group: Group = None) -> Answer:
    """The result of the first rank's work, on every rank. Raises: its error, on every rank."""
    is_first = rank_and_size()[0] == 0
    results: list[Any] = on_every_rank(work if is_first else lambda: None, group)
    answer: Answer = results[0]
    return answer


def on_every_rank(work: Callable[[], Answer], group: Group = None) -> list[Answer]:
    """The results of all ranks' work, on every rank. Raises: the first rank's error, on every rank."""
    size = rank_and_size()[1]
    if size == 1:
        return [work()]
    import torch.distributed

    outcome: tuple[Answer | None, Exception | None]
    try:
        outcome = work(), None
    except Exception as error:  # sent as a value: if only one rank raised it, the others would wait
        outcome = None, error
    outcomes: list[Any] = [None] * size
    torch.distributed.all_gather_object(outcomes, outcome, group=group)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def share_of(sizes: Mapping[str, int], rank: int, num_ranks: int) -> list[str]:
    """The files that one rank reads: in turn, the largest first."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[rank::num_ranks]
