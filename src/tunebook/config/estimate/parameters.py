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
        trained=facts.num_parameters if is_full else config.peft.rank * _adapter_of_rank_one(facts),
        frozen=0 if is_full else facts.num_parameters,
        layers=_in_layers(facts),
        embeddings=embeddings,
        trained_embeddings=embeddings if is_full else 0,
    )


def of_layers(facts: ModelFacts, measured: float) -> float:
    """A number measured of all layers, for as many as are planned with: some runs cut a model to fewer."""
    return measured * facts.num_layers / max(1, facts.measured.num_layers if facts.measured else facts.num_layers)


def _in_layers(facts: ModelFacts) -> int:
    """Without the embeddings and the output head, which may be the same matrix."""
    if facts.measured is not None:
        return round(of_layers(facts, facts.measured.parameters))
    return max(0, facts.num_parameters - facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2))


def _adapter_of_rank_one(facts: ModelFacts) -> int:
    """Inputs and outputs of the linear layers: query and output, key and value, and the three of the feed-forward."""
    if facts.measured is not None:
        return round(of_layers(facts, facts.measured.adapter_parameters))
    hidden, inner = facts.hidden_size, facts.intermediate_size
    keys = hidden * facts.num_key_value_heads // facts.num_attention_heads
    return (2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + inner)) * facts.num_layers
