"""Reshard a verified ZeRO checkpoint for another number of ranks, through DeepSpeed's universal checkpoint.

ZeRO saves a shard for each rank. A universal checkpoint has a file for each parameter and each of its moments, and any
number of ranks can load their shares from it. DDP's checkpoints are not sharded; torch itself reshards FSDP's.
"""

from __future__ import annotations

import io
import shutil
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tunebook.checkpoint.record import Identity
from tunebook.checkpoint.unpickling import restricted_unpickling
from tunebook.config.choices import Strategy
from tunebook.parallel.deepspeed import zero_stage

# Other checkpoint files that the trainer reads. Weights, moments and DeepSpeed's state are in the universal folder.
_OF_THE_TRAINER = ("trainer_state.json", "scheduler.pt", "rng_state*.pth")


def needs_universal(saved: Identity, current: Identity) -> bool:
    """Whether DeepSpeed needs a universal checkpoint to load one with the identity `saved`."""
    return zero_stage(Strategy[current.strategy]) is not None and saved.world_size != current.world_size


def write_universal(checkpoint: Path, place: Path) -> Path:
    """Write the universal form of a ZeRO checkpoint into a new folder in `place` and return its path. For one process.

    Takes the disk space of the checkpoint and the memory of the fp32 weights (under ZeRO-3 of one rank's shard).
    Raises: DataError for a shard that would run code, any error of DeepSpeed.
    """
    from deepspeed.checkpoint import ds_to_universal

    (shards,) = [path for path in checkpoint.glob("global_step*") if path.is_dir()]
    folder = place / f"universal-{checkpoint.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for pattern in _OF_THE_TRAINER:
        for file in checkpoint.glob(pattern):
            shutil.copy2(file, folder)
    arguments = Namespace(
        input_folder=str(shards),
        output_folder=str(folder / f"{shards.name}_universal"),
        num_extract_workers=1,  # in this process
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # state that only Megatron writes
    )
    with restricted_unpickling(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)
    return folder


def link_in_flat_order() -> None:
    """Correct the recorded places of parameters under ZeRO-1 and 2 with `round_robin_gradients`.

    DeepSpeed 0.19 records them in the order of the model, although the parameters were assigned to the ranks one by
    one. Only universal checkpoints use these places. Needed until `_link_all_hp_params` reads the assigned order.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    upstream = DeepSpeedZeroOptimizer._link_all_hp_params
    if upstream.__name__ == "_link_in_flat_order":
        return

    def _link_in_flat_order(self: Any) -> None:
        given = self.bit16_groups
        self.bit16_groups = self.round_robin_bit16_groups
        try:
            upstream(self)
        finally:
            self.bit16_groups = given

    DeepSpeedZeroOptimizer._link_all_hp_params = _link_in_flat_order
