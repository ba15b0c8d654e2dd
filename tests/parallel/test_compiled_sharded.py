"""Compiled blocks under FSDP: compiled once, for the sizes of their own and rows of any length."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tunebook.model.blocks import compile_layers, transformer_blocks
from tunebook.parallel.fsdp import mixed_precision_policy

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("own_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler's
]


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


def test_only_the_inputs_of_a_block_stay_open(one_gloo_rank, qwen2, config_on):
    graphs = Graphs()
    assert compile_layers(qwen2, backend=graphs) == 2
    train(wrapped(qwen2, config_on("fsdp", 2)), 16, 21, 12)
    assert len(graphs) == 1, "both blocks, and rows of all lengths, share one compilation"
    tensors = {name: value for name, value in graphs[0].items() if isinstance(value, torch.Tensor)}
    opened = {name for name, value in tensors.items() if any(isinstance(size, torch.SymInt) for size in value.shape)}
    assert opened
    assert not [name for name in opened if "_self_" in name]
    numbers = [name for name, value in graphs[0].items() if isinstance(value, torch.SymInt)]
    assert not [name for name in numbers if "_self_" in name], "the size of a head is known to the compiler"
    (cosines,) = (value for name, value in tensors.items() if "position_embeddings_0" in name)
    assert str(cosines.shape[-1]) == "32", "a number, not a symbol"
