"""Facts of layers for tests, with numbers of which only some matter."""

from __future__ import annotations

from typing import Any

from tunebook.config.model_facts import LayerFacts, ModelFacts


def measured(**numbers: Any) -> LayerFacts:
    """`LayerFacts` of the given numbers; a parameter and an input where a number does not matter."""
    ones = dict.fromkeys(("num_layers", "parameters", "linear_parameters"), 1)
    parameters, layers = numbers.get("parameters", 1), numbers.get("num_layers", 1)
    weights = sum(inputs * outputs for inputs, outputs in numbers.get("adapters", {}).values()) // layers
    defaults = {"active_parameters": parameters, "largest_parameter": parameters}
    return LayerFacts(**(ones | defaults | {"linear_parameters": weights or parameters} | numbers))


def llama_layers(facts: ModelFacts, **numbers: Any) -> LayerFacts:
    """Llama's layers of the sizes of a model, without their norms."""
    hidden, inner, number = facts.hidden_size, facts.intermediate_size, facts.num_layers
    keys = hidden * facts.num_key_value_heads // facts.num_attention_heads
    layers = {
        "q_proj": (hidden, hidden), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (hidden, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip
    largest = max(facts.vocab_size, inner) * hidden
    return measured(
        **{
            "num_layers": number,
            "parameters": number * sum(inputs * outputs for inputs, outputs in layers.values()),
            "adapters": {name: [number * inputs, number * outputs] for name, (inputs, outputs) in layers.items()},
            "largest_parameter": largest,
        }
        | numbers
    )
