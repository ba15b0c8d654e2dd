"""Muon and AdamW as one optimizer: who updates what, what a step does, and what a checkpoint holds."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon

from tunebook.config.schema import OptimizerConfig
from tunebook.train.muon import muon_with_adamw

SETTINGS = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, epsilon=1e-6)


class Model(nn.Module):
    """The kinds of parameters: embeddings, a matrix with a bias, a norm, stacked experts, and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.project = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.randn(2, 6, 4))
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) -> (tokens, 7)"""
        hidden = torch.einsum("wh,eho->wo", self.project(self.embed_tokens(token_ids)), self.experts)
        return self.lm_head(self.norm(hidden))


def trained(model, optimizer, steps):
    for _ in range(steps):
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest():
    torch.manual_seed(0)
    model = Model()
    alike = copy.deepcopy(model)
    others = [alike.embed_tokens.weight, alike.experts, alike.lm_head.weight]
    vectors = [alike.project.bias, *alike.norm.parameters()]
    numbers = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6}
    pair = (
        Muon([alike.project.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW([{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], **numbers),
    )
    for _ in range(3):
        alike(torch.arange(7)).square().sum().backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    found = trained(model, muon_with_adamw(model, SETTINGS), 3)
    for name, weight in alike.state_dict().items():
        torch.testing.assert_close(found[name], weight, msg=name)


def test_a_loaded_optimizer_goes_on_to_the_last_bit():
    torch.manual_seed(0)
    model = Model()
    optimizer = muon_with_adamw(model, SETTINGS)
    trained(model, optimizer, 2)
    other = copy.deepcopy(model)
    resumed = muon_with_adamw(other, SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    straight, again = trained(model, optimizer, 2), trained(other, resumed, 2)
    assert all(torch.equal(straight[name], again[name]) for name in straight)


def test_sharded_matrices_are_updated_as_whole_ones_are(one_gloo_rank):
    torch.manual_seed(0)
    whole = Model()
    sharded = copy.deepcopy(whole)
    fully_shard(sharded)
    found = trained(sharded, muon_with_adamw(sharded, SETTINGS), 2)
    for name, weight in trained(whole, muon_with_adamw(whole, SETTINGS), 2).items():
        torch.testing.assert_close(found[name].full_tensor(), weight, msg=name)


def test_the_state_of_a_sharded_model_is_stored_and_loaded_whole(one_gloo_rank):
    """As accelerate does for FSDP2's checkpoints."""
    torch.manual_seed(0)
    model, other = Model(), Model()
    for each in (model, other):
        fully_shard(each)
    optimizer, resumed = muon_with_adamw(model, SETTINGS), muon_with_adamw(other, SETTINGS)
    trained(model, optimizer, 2)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    straight, again = trained(model, optimizer, 1), trained(other, resumed, 1)
    assert all(torch.equal(straight[name].full_tensor(), again[name].full_tensor()) for name in straight)
