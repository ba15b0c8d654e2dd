"""Working memory of one layer, in addition to what it keeps: gradients and intermediate results of its inner numbers.

Source: the tensors that are alive while transformers 5.23 and PEFT 0.21 compute a layer on tensors without memory
(tests/plan/memory/live_tensors.py repeats it), and runs of compiled layers. `hidden` and `inner` are the sizes of the
model; `element` is the number of bytes of one number.

Experts: transformers 5.23 computes all experts of a layer in grouped products (integrations/moe.py). Each token has a
row of hidden and of inner numbers for each of its experts, in the format of the experts' weights: autocast does not
cast them. Source: such layers in tests/plan/memory/live_experts.py. Only models without a grouped product loop over
experts. That needs less for each token, which is not counted.
"""

from __future__ import annotations

from dataclasses import replace

from tunebook.config.choices import Checkpointing, Compute, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.facts.attention import attention_facts
from tunebook.plan.memory.kept import (
    adapts_mlp_output,
    attended_length,
    four_bit_layers_return_fp32,
    fp32_bytes_of_four_bit_layers,
    has_dropout,
    inputs_of_layers,
    inputs_with_adapter,
    is_tiled,
    kept_by_layers,
    kept_by_one_layer,
    left_by_offloading,
    mask_bytes,
    per_layer_inputs_bytes,
    tokens_per_pass,
    traced_layers,
    trains_experts,
)
from tunebook.plan.memory.states import (
    bytes_per_compute_value,
    bytes_per_expert_value,
    bytes_per_hidden_value,
    bytes_per_trained_weight,
)

# TRL's activation offloading holds 5 tensors that are being copied in a forward pass, and the next one (trl 1.16,
# models/activation_offloading.py). They are inputs of layers, or what the last norm and product save, in bytes per
# hidden number.
_BEING_COPIED, _BEING_COPIED_BYTES = 6, 8
# Architectures with a norm after the feed-forward network, by the prefixes of their class names.
NORM_AFTER_INNER = ("Exaone4", "Gemma2", "Gemma3", "Glm4", "Olmo2", "Olmo3")
# Bytes per inner number that an adapter on each of these layers needs in the backward pass of a compiled layer.
_ADAPTER_WORK_BYTES = {"gate_proj": 4, "up_proj": 2, "gate_up_proj": 6}


def is_recomputed(config: RunConfig) -> bool:
    """Whether activation checkpointing recomputes whole layers."""
    return config.activation.checkpointing is Checkpointing.enabled


def kept_on_device(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that all layers keep on the GPU for one pass, including the mask and what is computed for all of them."""
    shares = 0.0 if config.activation.offload else per_layer_inputs_bytes(config, facts)
    if is_recomputed(config):
        on_device = _BEING_COPIED / max(1, facts.num_layers) if config.activation.offload else 1.0
        return mask_bytes(config) + inputs_of_layers(config, facts) * min(1.0, on_device) + shares
    kept = kept_by_layers(config, facts) + shares
    if config.activation.offload:
        being_copied = float(_BEING_COPIED_BYTES * tokens_per_pass(config) * facts.hidden_size)
        kept = min(kept, left_by_offloading(config, facts) + being_copied)
    return mask_bytes(config) + kept


def kept_in_backward(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that offloaded, recomputed layers keep on the GPU in the backward pass: one input, or two with adapters.

    The first backward hook of TRL's offloading drops the tensors that were being copied, and each layer brings back its
    own input (trl 1.16, models/activation_offloading.py, unpack_tensor_with_streams). With adapters, the output of the
    embeddings also stays: `enable_input_require_grads` makes it a leaf, which autograd holds to add up its gradient.
    """
    inputs = 1 if config.peft.method is PeftMethod.full else 2
    return mask_bytes(config) + inputs_of_layers(config, facts) * min(1.0, inputs / max(1, facts.num_layers))


def forward_work(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that the last layer needs in its forward pass in addition to what all layers keep.

    An fp32 adapter on the layer that reads the inner numbers needs them and its dropout's output in fp32. With
    offloading, gate, up, their product and the result have not been copied yet.
    """
    tokens, is_fp32 = tokens_per_pass(config), config.precision.compute is Compute.fp32
    if is_recomputed(config):
        return 0.0
    if routes_tokens(facts):
        work = experts_forward_bytes(config, facts)
        if config.activation.offload:
            work += 8.0 * facts.hidden_size + kept_by_experts(config, facts)
        return min(tokens * work, 2 * kept_by_one_layer(config, facts)) if config.activation.offload else tokens * work
    if config.activation.offload:
        inner = 20 if is_fp32 else (17 if has_dropout(config) else 12) if _casts_mlp_to_fp32(config) else 10
        at_work = tokens * (8.0 * facts.hidden_size + inner * facts.intermediate_size)
        return min(at_work, 2 * kept_by_one_layer(config, facts))
    if config.model.compile_layers or config.peft.method is PeftMethod.full or not adapts_mlp_output(config):
        return 0.0
    inner = 4 if is_fp32 else (10 if has_dropout(config) else 6) if _casts_mlp_to_fp32(config) else 2
    return float(tokens * inner * facts.intermediate_size)


def backward_work(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that a layer needs in its backward pass in addition to what all layers keep.

    A recomputed layer holds everything that it keeps except its input, which is kept anyway.
    """
    at_inner, softmax = _mlp_work(config, facts), _softmax_work(config, facts)
    if is_tiled(config):
        at_inner = _tiled_work(config, facts, at_inner)
    if is_recomputed(config):
        return kept_by_one_layer(config, facts) + max(0.0, at_inner, softmax)
    if config.activation.offload and routes_tokens(facts):  # what the experts saved is back on the GPU
        return at_inner + tokens_per_pass(config) * kept_by_experts(config, facts)
    return 0.0 if config.activation.offload else max(at_inner, softmax)


def _mlp_work(config: RunConfig, facts: ModelFacts) -> float:
    """Working memory in bytes while a layer's backward pass is at its inner numbers, or at its experts."""
    if routes_tokens(facts):  # also of compiled layers, which have been neither recorded nor traced
        return tokens_per_pass(config) * experts_backward_bytes(config, facts, is_recomputed=is_recomputed(config))
    compute = _compiled_work if config.model.compile_layers else _plain_work
    hidden, inner = compute(config, facts)
    return max(0.0, tokens_per_pass(config) * (hidden * facts.hidden_size + inner * facts.intermediate_size))


def kept_by_mlp(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that the MLP of a layer keeps without tiles, except its input; 0 if it was not traced apart."""
    whole, tiled = (replace(config, activation=replace(config.activation, mlp_tile_tokens=size)) for size in (None, 1))
    return kept_by_one_layer(whole, facts) - kept_by_one_layer(tiled, facts)


def _tiled_work(config: RunConfig, facts: ModelFacts, whole: float) -> float:
    """Working memory in bytes of a layer whose MLP is computed in tiles and would need `whole` without them.

    One tile's inner numbers exist at a time, with the gradients of the inputs of the other tiles. In a long row the
    gradients of the norms need more, since they are computed in fp32.
    """
    tokens, tile = tokens_per_pass(config), config.activation.mlp_tile_tokens
    assert tile is not None
    hidden, is_wide = float(tokens * facts.hidden_size), bytes_per_hidden_value(config) == 4
    # 12.5 by the recorded tensors; GPUs needed less than 10 (Qwen3-4B by FSDP, h200x2_sequence.jsonl).
    at_norms = 10 if is_wide else 18
    if config.peft.method is not PeftMethod.full:
        at_norms += 6 if is_wide else 2
    if facts.architecture.startswith(NORM_AFTER_INNER):
        at_norms += 8 if is_wide else 2
    at_tile = hidden * bytes_per_hidden_value(config) + (kept_by_mlp(config, facts) + whole) * tile / tokens
    return max(hidden * at_norms, at_tile)


def _plain_work(config: RunConfig, facts: ModelFacts) -> tuple[float, float]:
    """Bytes per hidden and per inner number of a layer that is not compiled, from the recorded live tensors.

    The values for 4-bit weights that return fp32 are from eight runs of 5 layers of Qwen2.5-7B (h200_quantised).
    """
    stream, element, again = bytes_per_hidden_value(config), bytes_per_compute_value(config), is_recomputed(config)
    if four_bit_layers_return_fp32(config):
        return (16 if again else -8), (7 if adapts_mlp_output(config) else 9)
    if not again:
        return (6, 4) if _casts_mlp_to_fp32(config) else (0, element)
    hidden = 0 if stream == 4 else stream  # in fp32 it replaces the input
    if not _is_adapter_in_16_bits(config):
        return hidden, 2 * element
    if _casts_mlp_to_fp32(config):
        return hidden + stream + 6, 2 * element + (6 if has_dropout(config) else 2)
    if not adapts_mlp_output(config):
        return hidden, 2 * element + 2
    return (hidden + stream + 6, 2 * element - 2) if has_dropout(config) else (hidden, 2 * element)


def _compiled_work(config: RunConfig, facts: ModelFacts) -> tuple[float, float]:
    """Bytes per hidden and per inner number of a compiled layer.

    One kernel recomputes the product of gate and up and writes two gradients to new memory: recorded on an H100 and on
    a CPU. A norm after the feed-forward network needs the product earlier; the gradients then overwrite it.
    """
    again, is_selective = is_recomputed(config), config.activation.checkpointing is Checkpointing.selective
    if _is_adapter_in_16_bits(config):
        return (4 if again and bytes_per_hidden_value(config) == 2 else 0), _adapter_work(config, facts)
    if not again and not (is_selective and config.peft.method is PeftMethod.full):
        return 0, 0
    has_norm_after = facts.architecture.startswith(NORM_AFTER_INNER)
    products = (4 if is_selective else 3) - (2 if has_norm_after else 0)
    return (0 if again else bytes_per_hidden_value(config)), products * bytes_per_compute_value(config)


def _adapter_work(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes per inner number of a compiled layer with adapters: two gradients, and what adapters read or add to.

    From 25 runs of Qwen2.5-7B and Llama 3 8B that differ in which layers have an adapter (h200x2_held_out, "targets").
    """
    named = inputs_with_adapter(config, facts)
    of_adapters = sum(size for name, size in _ADAPTER_WORK_BYTES.items() if name in named)
    if four_bit_layers_return_fp32(config):
        of_adapters += (2 if adapts_mlp_output(config) else 1) - round(fp32_bytes_of_four_bit_layers(config, facts))
    return 4 + of_adapters - (2 if has_dropout(config) and adapts_mlp_output(config) else 0)


def _softmax_work(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of attention without a kernel while the gradient of its softmax is computed, all in fp32.

    Counts the softmax, its gradient, their product and the gradient of its input. A 16-bit copy is freed by then.
    """
    if not attention_facts(config).keeps_softmax:
        return 0.0
    pairs = float(tokens_per_pass(config) * attended_length(config)) * facts.num_attention_heads
    return pairs * (12 if bytes_per_compute_value(config) == 4 else 10)


def recomputes_compiled_mlp(config: RunConfig) -> bool:
    """Whether compiled layers are fully trained with selective checkpointing."""
    is_full = config.peft.method is PeftMethod.full
    is_selective = config.activation.checkpointing is Checkpointing.selective
    return is_full and is_selective and bool(config.model.compile_layers) and not config.activation.offload


def _is_adapter_in_16_bits(config: RunConfig) -> bool:
    return config.peft.method is not PeftMethod.full and bytes_per_compute_value(config) == 2


def _casts_mlp_to_fp32(config: RunConfig) -> bool:
    """Whether an adapter casts the inner numbers to its own fp32, as PEFT does.

    Not if FSDP or DeepSpeed casts the adapter to 16 bits, nor with 4-bit weights (peft 0.21, tuners/lora/bnb.py).
    """
    is_cast = isinstance(config.parallelism, FsdpConfig) or bytes_per_trained_weight(config) == 2
    is_four_bit = config.peft.method is PeftMethod.qlora
    return _is_adapter_in_16_bits(config) and not is_cast and not is_four_bit and adapts_mlp_output(config)


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
    held = int(_are_frozen(config, facts)) + int(traced_layers(facts).has_expert_biases)
    at_end = 2 + held
    element = bytes_per_expert_value(config, facts)
    if element == 2 and config.precision.compute is not Compute.fp32:
        at_end += 1
    return element * max(at_end * hidden, _at_gate_forward(config, facts, hidden, inner))


def _at_gate_forward(config: RunConfig, facts: ModelFacts, hidden: float, inner: float) -> float:
    """Numbers that the activation of gate and up needs, with the gathered biases of both."""
    if not traced_layers(facts).has_expert_biases:
        return 0.0
    return 4 * inner if _are_frozen(config, facts) else 3 * inner - hidden


def experts_backward_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """Bytes per token that a layer's backward pass needs in addition to what it keeps.

    First, the gradient of the weighted outputs, the gradient of the outputs, and the product whose sum is the gradient
    of the weights. Experts that are wider than the hidden size need more for the gradients of gate and up. A recomputed
    layer holds the gathered biases until its forward pass ends, while the gradient already exists.
    """
    hidden, inner = _numbers(facts)
    element, is_frozen = bytes_per_expert_value(config, facts), _are_frozen(config, facts)
    at_outputs, at_gate = 3 * hidden, (3 if is_frozen else 2) * inner - hidden
    if is_recomputed and traced_layers(facts).has_expert_biases:
        at_outputs += hidden * is_frozen
        at_gate = max(at_gate, 4 * inner + hidden if is_frozen else 3 * inner)
    # In fp32 the norm's output replaces the layer's input, which is kept anyway.
    norms = (2 if bytes_per_hidden_value(config) == 2 else 0) * is_recomputed
    return element * max(at_outputs, at_gate) + norms * facts.hidden_size


def kept_by_experts(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes per token that the experts of a layer save: inputs, gate and up, activation, product and outputs."""
    hidden, inner = _numbers(facts)
    return bytes_per_expert_value(config, facts) * (2 * hidden + 4 * inner)


def _numbers(facts: ModelFacts) -> tuple[float, float]:
    """Hidden and inner numbers of all experts of a token."""
    measured = traced_layers(facts)
    chosen = float(measured.experts_per_token)
    return chosen * facts.hidden_size, chosen * measured.expert_size


def _are_frozen(config: RunConfig, facts: ModelFacts) -> bool:
    return config.peft.method is not PeftMethod.full and not trains_experts(config, facts)
