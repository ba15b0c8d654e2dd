"""When ZeRO's shards have to be cut anew, and what is refused; that losses stay the same is tried in tests/system."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tunebook.checkpoint.record import Identity
from tunebook.checkpoint.resharding import needs_universal, write_universal
from tunebook.errors import TunebookError


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


def test_shards_that_deepspeed_does_not_know_are_an_error(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    shard = io.BytesIO()
    torch.save({"optimizer_state_dict": {}}, shard)
    files = {
        "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": shard.getvalue(),
        "trainer_state.json": b"{}",
        "rng_state_1.pth": b"",
        "model.safetensors": b"",
    }
    checkpoint = make_checkpoint(tmp_path, 4, files)
    place = tmp_path / "place"
    (place / "universal-checkpoint-4" / "old").mkdir(parents=True)  # of an attempt that was killed
    with pytest.raises(TunebookError, match=r"checkpoint-4 cannot be resharded .*as many ranks as saved it") as raised:
        write_universal(checkpoint, place)
    assert raised.value.problem_id == "checkpoint-not-resharded"
    left = sorted(path.name for path in (place / "universal-checkpoint-4").iterdir() if path.is_file())
    assert left == ["rng_state_1.pth", "trainer_state.json"]
    assert not (place / "universal-checkpoint-4" / "old").exists()
