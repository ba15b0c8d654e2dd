"""Working memory of a layer whose tokens are each sent to some of many experts.

transformers 5.23 computes all experts of a layer in grouped products (integrations/moe.py). Each token has a row of
hidden and of inner numbers for each of its experts, in the format of the experts' weights: autocast does not cast them.
Source: the tensors that are alive while such layers are computed without memory (tests/plan/memory/live_experts.py).
Only models without a grouped product loop over experts. That needs less for each token, which is not counted.
"""

from __future__ import annotations

from tunebook.config.choices import Compute, PeftMethod
from tunebook.config.model_facts import MeasuredLayers, ModelFacts
from tunebook.config.schema import RunConfig
from tunebook.plan.memory.kept import bytes_per_hidden_value, trains_experts


def routes_tokens(facts: ModelFacts) -> bool:
    """Whether the layers send each token to some of several experts."""
    return facts.measured is not None and facts.measured.experts_per_token > 0


def experts_forward_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes per token that the last layer's forward pass needs in addition to what it keeps.

    At the end, the experts' outputs exist before and after they are put in the tokens' order. Frozen experts do not
    keep their gathered inputs, but still hold them, and gathered biases are held too. Autocast adds the outputs of
    16-bit experts up in fp32.
    """
    hidden, inner = _numbers(facts)
    held = int(_are_frozen(config, facts)) + int(_measured(facts).has_expert_biases)
    at_end = 2 + held
    if bytes_per_hidden_value(config) == 2 and config.precision.compute is not Compute.fp32:
        at_end += 1
    return bytes_per_hidden_value(config) * max(at_end * hidden, _at_gate_forward(config, facts, hidden, inner))


def _at_gate_forward(config: RunConfig, facts: ModelFacts, hidden: float, inner: float) -> float:
    """Numbers that the activation of gate and up needs, with the gathered biases of both."""
    if not _measured(facts).has_expert_biases:
        return 0.0
    return 4 * inner if _are_frozen(config, facts) else 3 * inner - hidden


def experts_backward_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """Bytes per token that a layer's backward pass needs in addition to what it keeps.

    First, the gradient of the weighted outputs, the gradient of the outputs, and the product whose sum is the gradient
    of the weights. Experts that are wider than the hidden size need more for the gradients of gate and up. A recomputed
    layer holds the gathered biases until its forward pass ends, while the gradient already exists.
    """
    hidden, inner = _numbers(facts)
    element, is_frozen = bytes_per_hidden_value(config), _are_frozen(config, facts)
    at_outputs, at_gate = 3 * hidden, (3 if is_frozen else 2) * inner - hidden
    if is_recomputed and _measured(facts).has_expert_biases:
        at_outputs += hidden * is_frozen
        at_gate = max(at_gate, 4 * inner + hidden if is_frozen else 3 * inner)
    # In fp32 the norm's output replaces the layer's input, which is kept anyway.
    norms = (element if element == 2 else 0) * is_recomputed
    return element * max(at_outputs, at_gate) + norms * facts.hidden_size


def kept_by_experts(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes per token that the experts of a layer save: inputs, gate and up, activation, product and outputs."""
    hidden, inner = _numbers(facts)
    return bytes_per_hidden_value(config) * (2 * hidden + 4 * inner)


def _numbers(facts: ModelFacts) -> tuple[float, float]:
    """Hidden and inner numbers of all experts of a token."""
    measured = _measured(facts)
    chosen = float(measured.experts_per_token)
    return chosen * facts.hidden_size, chosen * measured.expert_size


def _are_frozen(config: RunConfig, facts: ModelFacts) -> bool:
    return config.peft.method is not PeftMethod.full and not trains_experts(config, facts)


def _measured(facts: ModelFacts) -> MeasuredLayers:
    assert facts.measured is not None, "memory is estimated of traced layers only"
    return facts.measured
