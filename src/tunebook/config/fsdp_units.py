"""How large the parts of a model are that FSDP makes units of by size, from its facts alone.

`parallel.units` finds the units in the model itself. Here the largest is worked out for layers as Llama has them,
before adapters are put on them and before 4 bits are packed.
"""

from __future__ import annotations

from tunebook.config.model_facts import ModelFacts


def layer_parameters(facts: ModelFacts) -> int:
    """Of one decoder layer, with its norms and biases: no part that repeats is larger."""
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    return max(0, facts.num_parameters - embeddings - facts.hidden_size) // max(1, facts.num_layers)  # less a last norm
