"""Settings of the training methods, a dataclass each. `facts.methods` has what else each method is."""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import DpoLoss
from tunebook.config.ranges import number


@dataclass(kw_only=True)
class MethodConfig:
    """How the model learns: from documents (sft), or from pairs of a better and a worse answer (dpo)."""

    name: str = "sft"  # set by method=NAME


@dataclass(kw_only=True)
class DpoConfig(MethodConfig):
    """Direct preference optimization (arXiv:2305.18290), by TRL's loss. The reference is the untrained model."""

    # How closely the model stays to the reference; of loss_type=ipo its tau
    beta: float = number(0.1, above=0)
    loss_type: DpoLoss = DpoLoss.sigmoid
    # Probability that a pair's preference is wrong: of the losses sigmoid, robust and exo_pair
    label_smoothing: float = number(0.0, at_least=0, below=0.5)
    # Weight of the chosen answers' SFT loss, which is added (arXiv:2404.19733); null: none
    rpo_alpha: float | None = number(None, above=0)
