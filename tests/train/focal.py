"""A method that only a test has: documents, in which tokens that the model knows already count less (a focal loss)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tunebook.config.schema import MethodConfig
from tunebook.facts.methods import MethodFacts, Metric
from tunebook.train.methods.sft import RecipeTrainer, trainer_config
from tunebook.train.methods.trainer import Run

__all__ = ["build", "trainer_config"]

METRICS = {"known_share": Metric(chart="Known", line="tokens", y_label="share of tokens")}
FACTS = MethodFacts(module=__name__, reads="documents", has_equal_tokens=False, metrics=METRICS)


@dataclass(kw_only=True)
class FocalConfig(MethodConfig):
    """The settings."""

    gamma: float = 2.0


def build(run: Run, **arguments: Any) -> FocalTrainer:
    settings = run.config.method
    assert isinstance(settings, FocalConfig)
    trainer = FocalTrainer(**arguments)
    trainer.gamma = settings.gamma
    return trainer


class FocalTrainer(RecipeTrainer):
    gamma: float
    known: float = 0.0

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        shares = outputs.log_probs.exp()
        self.known = float(((shares > 0.5) & outputs.label_mask).sum() / num_items_in_batch)
        loss: torch.Tensor = -((1 - shares) ** self.gamma * outputs.log_probs).sum()
        return loss / num_items_in_batch * self.accelerator.num_processes

    def step_metrics(self) -> dict[str, float]:
        return {"known_share": self.known}

    def validation_metrics(self, sums: Any) -> dict[str, float]:
        return super().validation_metrics(sums) | {"validation_known_share": 0.0}
