"""Muon for the weight matrices of the layers and AdamW for every other parameter, as one optimizer.

Source: torch.optim.Muon. Liu et al. 2025 (Muon is Scalable for LLM Training, section 2.2) scale its update to the size
of AdamW's, so that one learning rate and weight decay serve both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from tunebook.config.schema import OptimizerConfig
from tunebook.model.parameters import EMBEDDINGS, HEADS

_NOT_IN_LAYERS = {*EMBEDDINGS, *HEADS}


class MuonWithAdamW(Optimizer):
    """Steps some parameter groups with Muon and the others with AdamW.

    Both share this optimizer's groups and state, so schedulers and checkpoints see a single optimizer.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[dict[str, Any]], settings: OptimizerConfig) -> None:
        rate, decay = settings.learning_rate, settings.weight_decay
        self._muon = Muon([{"params": matrices}], lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        betas = (settings.beta1, settings.beta2)
        self._adamw = AdamW(others, lr=rate, betas=betas, eps=settings.epsilon, weight_decay=decay, fused=True)
        groups = [*self._muon.param_groups, *self._adamw.param_groups]
        super().__init__(groups, self._adamw.defaults | self._muon.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both with the existing gradients; a closure is not called."""
        del closure
        for optimizer, groups in ((self._muon, self.param_groups[:1]), (self._adamw, self.param_groups[1:])):
            optimizer.param_groups, optimizer.state = groups, self.state  # loading a checkpoint replaces both
            optimizer.step()  # type: ignore[no-untyped-call]


def muon_with_adamw(model: nn.Module, settings: OptimizerConfig) -> Optimizer:
    """Build the optimizer of a model's trained parameters.

    Muon gets each 2-D parameter but embeddings and output head. Biases and norms (1-D) have no weight decay.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_in_layer = id(parameter) not in embeddings and _NOT_IN_LAYERS.isdisjoint(name.split("."))
        kind = vectors if parameter.ndim < 2 else matrices if parameter.ndim == 2 and is_in_layer else others
        kind.append(parameter)
    return MuonWithAdamW(matrices, [{"params": others}, {"params": vectors, "weight_decay": 0.0}], settings)
