"""Which parts of a model FSDP makes its units where they are chosen by size, from its facts alone.

`parallel.units` finds them in the model itself. Here they are worked out for layers as Llama has them, of which the
parts and their sizes are known; before adapters are put on them, and before 4 bits are packed.
"""

from __future__ import annotations

from tunebook.config.estimate.parameters import product_sizes
from tunebook.config.model_facts import ModelFacts


def units_by_size(facts: ModelFacts, minimum: int) -> dict[str, int]:
    """The innermost kinds of parts all of which hold at least `minimum` parameters, and the parameters of one.

    Of `layer`, `attention`, `mlp`, `linear` and `norm`; of linear layers, which differ, those of the largest without a
    bias. Embeddings and the output head are units in any case, and all that is in none of them is another. Empty where
    no part is so large. Only for facts without measured layers.
    """
    smallest = _smallest(facts)
    large = {kind for kind, size in smallest.items() if size >= minimum}
    inside = {"layer": {*smallest} - {"layer"}, "attention": {"linear"}, "mlp": {"linear"}}
    units = [kind for kind in smallest if kind in large and not inside.get(kind, set()) & large]
    return {kind: _largest_linear(facts) if kind == "linear" else smallest[kind] for kind in units}


def layer_parameters(facts: ModelFacts) -> int:
    """Of one decoder layer, with its norms and biases."""
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    return max(0, facts.num_parameters - embeddings - facts.hidden_size) // max(1, facts.num_layers)  # less a last norm


def _smallest(facts: ModelFacts) -> dict[str, int]:
    """Parameters of the smallest part of each kind, from the outermost to the innermost."""
    hidden, sizes = facts.hidden_size, product_sizes(facts)
    keys, inner = sizes["k_proj"], sizes["gate_proj"]
    layer, mlp = layer_parameters(facts), 3 * inner
    attention = max(0, layer - mlp - 2 * hidden)
    bias = keys // max(1, hidden) if attention > 2 * (sizes["q_proj"] + keys) else 0
    return {
        "layer": layer,
        "attention": attention,
        "mlp": mlp,
        "linear": min(keys + bias, inner),
        "norm": hidden,
    }


def _largest_linear(facts: ModelFacts) -> int:
    return max(product_sizes(facts).values())
