"""Activation offloading: activations move, and weights do not, wherever FSDP or DeepSpeed has them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trl.models.activation_offloading import OffloadActivations

from tunebook.train.offloaded_weights import leave_weights

HIDDEN, INNER = 256, 1024
WEIGHTS = {(HIDDEN, INNER), (INNER, HIDDEN)}
# Of gradients by products in bf16: a weight that was moved and is back may have other strides, for which another kernel
# sums in another order, and that changes less than one rounding of every number. A wrong weight changes all of it.
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


class Block(nn.Module):
    """A feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.up(hidden)
        return hidden + self.down(nn.functional.silu(inner))


@pytest.fixture
def offloading(monkeypatch):
    """TRL's, for which this CPU is the device that activations are moved away from."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
    return OffloadActivations(use_pin_memory=False, use_streams=False)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def sharded(model):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=False)
    for part in [*model, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    return model


def one_pass(model, offloading, dtype=torch.float32):
    """The shapes that were moved and that were not, and the gradients."""
    if not offloading.param_storages:
        offloading.update_model_params(model)
    hidden = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), offloading:
        loss = model(hidden).float().square().mean()
        saved = list(offloading.tracker.values())
        loss.backward()
    moved = {tuple(one.shape) for one, is_moved, *_ in saved if is_moved}
    stays = {tuple(one.shape) for one, is_moved, *_ in saved if not is_moved}
    assert not offloading.tracker, "the backward pass has asked for all of it"
    return moved, stays, [getattr(one.grad, "_local_tensor", one.grad) for one in model.parameters()]


def test_weights_that_fsdp_gathers_stay_and_the_gradients_are_the_same(one_gloo_rank, offloading, relative_difference):
    moved, _, before = one_pass(sharded(blocks()), offloading)
    assert moved >= WEIGHTS, "what upstream does: once this fails, it is not needed any more"
    leave_weights(offloading)
    moved, stays, gradients = one_pass(sharded(blocks()), offloading)
    assert moved == {(8, HIDDEN), (8, INNER)} and stays >= WEIGHTS
    assert len(gradients) == len(before) == 4
    assert max(map(relative_difference, gradients, before)) < ROUNDING


def test_nothing_is_remembered_of_where_a_gathered_weight_was(one_gloo_rank, offloading):
    """FSDP lets go of it, and the memory is an activation's."""
    leave_weights(offloading)
    model = sharded(blocks())
    one_pass(model, offloading)
    known = set(offloading.param_storages)
    one_pass(model, offloading)
    assert offloading.param_storages == known


def test_adapters_over_frozen_weights_are_no_different(one_gloo_rank, offloading):
    model = blocks()
    for block in model:
        block.up.weight.requires_grad_(False)
    leave_weights(offloading)
    moved, _, gradients = one_pass(sharded(model), offloading)
    assert not moved & WEIGHTS
    assert [one is None for one in gradients] == [True, False, True, False]


def test_weights_that_were_put_elsewhere_stay_there(offloading, relative_difference):
    """As DeepSpeed casts a model, and lays its weights end to end, when TRL has looked up where they are."""
    model = blocks()
    offloading.update_model_params(model)
    kept = [weight.data for weight in model.parameters()]  # else what is made next may lie where these did
    model.to(torch.bfloat16)
    model.register_buffer("flat", torch.cat([one.data.flatten() for one in model.parameters()]))
    for weight, part in zip(model.parameters(), model.flat.split(HIDDEN * INNER), strict=True):
        weight.data = part.view_as(weight)
    moved, _, before = one_pass(model, offloading, torch.bfloat16)
    assert moved >= WEIGHTS and kept, "what upstream does: once this fails, it is not needed any more"
    before = [one.clone() for one in before]
    model.zero_grad()
    leave_weights(offloading)
    moved, stays, gradients = one_pass(model, offloading, torch.bfloat16)
    assert moved == {(8, HIDDEN), (8, INNER)} and stays >= WEIGHTS
    assert max(map(relative_difference, gradients, before)) < ROUNDING


def test_copies_that_autocast_makes_go_as_before(offloading):
    leave_weights(offloading)
    moved, _, _ = one_pass(blocks(), offloading)
    assert moved >= WEIGHTS


def test_in_compiled_layers_it_was_as_fast_and_took_as_much_without(project_root):
    """Qwen2.5-3B on two H100, which keeps all layers whole between the passes."""
    lines = (project_root / "tests/bench/results/h100x2_offloaded.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    after, before = (run for run in runs if run["name"] == "fsdp_grad_op_away")
    assert before["offloading"] == "TRL's own" != after["offloading"]
    assert after["memory_gib"] == before["memory_gib"]
    assert after["seconds_per_step"] == pytest.approx(before["seconds_per_step"], rel=0.01)
    assert after["losses"] == pytest.approx(before["losses"], rel=2e-4)
