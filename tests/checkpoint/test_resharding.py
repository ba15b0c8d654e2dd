"""When ZeRO's shards have to be cut anew, and what is refused; that losses stay the same is tried in tests/system."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.checkpoint.record import Identity
from tunebook.checkpoint.resharding import needs_universal


@pytest.mark.parametrize(
    ("strategy", "ranks", "is_needed"),
    [("zero3", 4, True), ("zero1", 1, True), ("zero3", 2, False), ("ddp", 4, False), ("fsdp", 4, False)],
)
def test_only_zero_on_another_number_of_ranks_needs_it(
    identity: Identity, strategy: str, ranks: int, is_needed: bool
) -> None:
    theirs = replace(identity, strategy=strategy)
    assert theirs.world_size == 2
    assert needs_universal(theirs, replace(theirs, world_size=ranks)) is is_needed
