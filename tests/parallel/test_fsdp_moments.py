"""What a rank holds at once in a step of real FSDP, against the plan's moments.

The ranks are pretended: torch's fake process group answers every collective at once with what it was given, which
leaves the sizes and lifetimes of tensors as they are. Rows are so short that layers weigh more than activations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

from tunebook.plan.memory.ledger import Kind
from tunebook.plan.memory.rows import step_ledger

from ..plan.memory.layers import llama_layers

RANKS, TOKENS = 8, 8
SIZES = {
    "hidden_size": 512, "intermediate_size": 7168, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip


class _Living(TorchDispatchMode):
    """The most bytes that storages made by any operation, and those it was told of, have together."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.most = 0
        self._see(tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._see(result)
        return result

    def _see(self, result) -> None:
        for tensor in tree_iter(result):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        total = 0
        for key, reference in list(self.storages.items()):
            if reference.expired():
                del self.storages[key]
            else:
                total += torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
        self.most = max(self.most, total)


@pytest.fixture
def pretended_ranks():
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    torch.distributed.destroy_process_group()


def _in_units(model: LlamaForCausalLM, mesh, *, is_tied: bool, reshards: bool) -> LlamaForCausalLM:
    """As accelerate makes them."""
    formats = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
    )
    ends: list[nn.Module] = [model.model.norm, model.lm_head]
    units = [*model.model.layers] if is_tied else [*model.model.layers, model.model.embed_tokens]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=formats, reshard_after_forward=reshards)
    last = [model.model.embed_tokens, *ends] if is_tied else ends
    fully_shard(last, mesh=mesh, mp_policy=formats, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, mp_policy=formats, reshard_after_forward=reshards)


def _most_bytes(mesh, *, is_tied: bool, reshards: bool) -> tuple[int, int]:
    """Of two passes; and the model's parameters."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied, attn_implementation="sdpa"))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _in_units(model, mesh, is_tied=is_tied, reshards=reshards)
    living = _Living([parameter.to_local() for parameter in model.parameters()])
    tokens = torch.arange(TOKENS)[None]
    with living:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
    return living.most, num_parameters


@pytest.mark.nightly
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("choice", ["fsdp", "fsdp_grad_op"])
def test_a_step_of_wide_layers_is_planned_as_it_is(config_on, pretended_ranks, choice, is_tied):
    traced, num_parameters = _most_bytes(pretended_ranks, is_tied=is_tied, reshards=choice == "fsdp")
    config = config_on(choice, RANKS)
    config.packing.row_length, config.training.micro_batch_size = TOKENS, 1
    assert config.model.facts is not None
    facts = replace(
        config.model.facts, num_layers=SIZES["num_hidden_layers"], hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["intermediate_size"], vocab_size=SIZES["vocab_size"],
        num_attention_heads=SIZES["num_attention_heads"], num_key_value_heads=SIZES["num_key_value_heads"],
        num_parameters=num_parameters, tie_word_embeddings=is_tied, architecture="LlamaForCausalLM",
    )  # fmt: skip
    facts.measured = llama_layers(facts)
    config.model = replace(config.model, facts=facts)
    ledger = step_ledger(config, facts, accumulates=True)
    planned = sum(size for kind, size in ledger.parts().items() if kind is not Kind.optimizer)
    assert planned == pytest.approx(traced, rel=0.05)
