"""A pass of FSDP that has begun and not ended is ended before training, whatever torch is there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent / "gpu_turns"))

from gpu_passes import EndOfPasses


def test_a_unit_whose_second_module_was_not_called_begins_anew(one_gloo_rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard([model[0], model[1]], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4))
    [unit] = [state for state in model._get_fsdp_state()._state_ctx.all_states if model[1] in state._modules]
    unit._modules_to_run_forward.add(model[1])  # as torch 2.11 leaves it
    EndOfPasses(SimpleNamespace(model_wrapped=model)).on_train_begin(None, None, None)
    assert not unit._modules_to_run_forward
