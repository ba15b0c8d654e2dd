"""Layers in fp8 under FSDP: still in fp8, and still ordinary weights under their own names."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tunebook.config.choices import Fp8Scaling
from tunebook.model.blocks import convert_to_fp8, count_fp8_layers

pytest.importorskip("torchao", reason="torchao is in the images of GPUs with fp8 only")
IDS = torch.arange(3, 19)[None]


def test_sharded_layers_stay_in_fp8_with_the_names_and_weights_they_had(one_gloo_rank, small_qwen2):
    model, other = (small_qwen2(intermediate_size=2048) for _ in range(2))
    stored = other.state_dict()
    convert_to_fp8(model, Fp8Scaling.tensorwise, emulate=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert count_fp8_layers(model) == 4
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    gathered = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    assert list(gathered) == list(stored)
    for name, weight in gathered.items():
        assert type(weight) is torch.Tensor
        assert torch.equal(weight, stored[name])
