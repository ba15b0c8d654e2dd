"""MLPs in tiles under FSDP: each block's gradients are reduced once, when those of all tiles are there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tunebook.model.blocks import transformer_blocks
from tunebook.model.tiled_mlp import tile_mlps

ROW, TILE = 29, 6


def gradients(model):
    ids = torch.arange(3, 3 + ROW)[None]
    for _ in range(2):  # passes of a step
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")  # older versions know no other name
@pytest.mark.parametrize("is_recomputed", [True, False])
def test_gradients_are_those_of_a_whole_model(one_gloo_rank, qwen2, is_recomputed):
    whole = copy.deepcopy(qwen2).train()
    expected = gradients(whole)
    model, mesh = qwen2.train(), init_device_mesh("cpu", (1,))
    if is_recomputed:
        model.gradient_checkpointing_enable()
    assert tile_mlps(model, TILE) == 2
    for block in transformer_blocks(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = gradients(model)
    assert {*found} == {*expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
