"""Starts torchtitan's trainer, on torch 2.11 too, which lacks names that torchtitan 0.3.0 uses."""

from __future__ import annotations

import torch.distributed.fsdp
from turns import end_steps_with, wait_for_gpus

IS_TORCH_2_11 = not hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


def main() -> None:
    """Train as the command line says."""
    wait_for_gpus()
    if IS_TORCH_2_11:
        torch.distributed.fsdp.DataParallelMeshDims = object  # for a way to use several GPUs that is not used here
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
        from torchtitan.models.common import decoder

        create_mask = decoder.create_attention_mask
        # torch 2.11 does what the argument asks for, but does not know it.
        decoder.create_attention_mask = lambda *words, separate_full_blocks, **more: create_mask(*words, **more)
    from torchtitan.train import main as train
    from torchtitan.trainer import Trainer

    end_steps_with(Trainer, "train_step")
    train()
