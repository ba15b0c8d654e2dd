"""How many parameters a model has where, and how many of them are trained."""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import PeftMethod
from tunebook.config.schema import ModelFacts, RunConfig


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters."""

    trained: int
    frozen: int
    layers: int  # of all decoder layers together, adapters not counted
    embeddings: int  # one matrix (vocab_size, hidden_size)
    trained_embeddings: int  # the same where it is trained


def count_parameters(config: RunConfig, facts: ModelFacts) -> Parameters:
    """Count a configuration's parameters."""
    embeddings = facts.vocab_size * facts.hidden_size
    is_full = config.peft.method is PeftMethod.full
    return Parameters(
        trained=facts.num_parameters if is_full else _adapter_parameters(config.peft.rank, facts),
        frozen=0 if is_full else facts.num_parameters,
        layers=max(0, facts.num_parameters - embeddings * (1 if facts.tie_word_embeddings else 2)),
        embeddings=embeddings,
        trained_embeddings=embeddings if is_full else 0,
    )


def _adapter_parameters(rank: int, facts: ModelFacts) -> int:
    """An adapter on each of the seven linear layers: rank x (inputs + outputs)."""
    sizes = 8 * facts.hidden_size + 3 * (facts.hidden_size + facts.intermediate_size)
    return rank * sizes * facts.num_layers
