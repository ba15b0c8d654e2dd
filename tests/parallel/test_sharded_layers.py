"""Layers that are compiled, in fp8 or computed in tiles, under FSDP."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tunebook.config.choices import Fp8Scaling
from tunebook.model.blocks import compile_layers, transformer_blocks
from tunebook.model.fp8 import convert_to_fp8, count_fp8_layers
from tunebook.model.tiled_mlp import tile_mlps
from tunebook.parallel.fsdp import mixed_precision_policy


class Graphs(list):
    """A back end that keeps what it is given: the inputs of every graph, and what they were traced with."""

    def __call__(self, graph, _inputs):
        self.append({n.name: n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"})
        return graph.forward


def wrapped(model, config):
    """As accelerate wraps a model whose head is tied: each block, then what shares a weight with the last norm."""
    settings = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": mixed_precision_policy(config)}
    for block in transformer_blocks(model).values():
        fully_shard(block, **settings)
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], **settings, reshard_after_forward=False)
    return fully_shard(model, **settings)


def train(model, *lengths):
    for length in lengths:
        ids, places = torch.arange(3, 3 + length)[None], torch.arange(length)[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
        logits.float().logsumexp(-1).sum().backward()


@pytest.mark.nightly
@pytest.mark.usefixtures("own_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's
def test_only_the_inputs_of_a_compiled_block_stay_open(one_gloo_rank, qwen2, config_on):
    graphs = Graphs()
    assert compile_layers(qwen2, backend=graphs) == 2
    train(wrapped(qwen2, config_on("fsdp")), 16, 21, 12)
    assert len(graphs) == 1, "both blocks, and rows of all lengths, share one compilation"
    tensors = {name: value for name, value in graphs[0].items() if isinstance(value, torch.Tensor)}
    opened = {name for name, value in tensors.items() if any(isinstance(size, torch.SymInt) for size in value.shape)}
    assert opened
    assert not [name for name in opened if "_self_" in name]
    numbers = [name for name, value in graphs[0].items() if isinstance(value, torch.SymInt)]
    assert not [name for name in numbers if "_self_" in name], "the size of a head is known to the compiler"
    (cosines,) = (value for name, value in tensors.items() if "position_embeddings_0" in name)
    assert str(cosines.shape[-1]) == "32", "a number, not a symbol"


def test_sharded_layers_stay_in_fp8_with_the_names_and_weights_they_had(one_gloo_rank, small_qwen2):
    pytest.importorskip("torchao", reason="torchao is in the images of GPUs with fp8 only")
    model, other = (small_qwen2(intermediate_size=2048) for _ in range(2))
    stored = other.state_dict()
    convert_to_fp8(model, Fp8Scaling.tensorwise, emulate=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert count_fp8_layers(model) == 4
    logits = model(input_ids=torch.arange(3, 19)[None], use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    gathered = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    assert list(gathered) == list(stored)
    for name, weight in gathered.items():
        assert type(weight) is torch.Tensor
        assert torch.equal(weight, stored[name])


def gradients(model):
    ids = torch.arange(3, 3 + 29)[None]
    for _ in range(2):  # passes of a step
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")  # older versions know no other name
@pytest.mark.parametrize("is_recomputed", [True, False])
def test_gradients_of_tiles_are_those_of_a_whole_model(one_gloo_rank, qwen2, is_recomputed):
    whole = copy.deepcopy(qwen2).train()
    expected = gradients(whole)
    model, mesh = qwen2.train(), init_device_mesh("cpu", (1,))
    if is_recomputed:
        model.gradient_checkpointing_enable()
    assert tile_mlps(model, 6) == 2
    for block in transformer_blocks(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = gradients(model)
    assert {*found} == {*expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
