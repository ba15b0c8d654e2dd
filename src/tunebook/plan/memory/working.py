"""What is there of the layers' activations at one time: kept until the backward pass, and at work in one layer.

Counted for a decoder layer of Llama's that is not compiled, per token, by following which tensors are alive while
transformers 5.23 and PEFT 0.21 compute it without memory, in every number format (tests/plan/memory/live_tensors.py
does so again); compiled layers are met without. `hidden`, `inner` and `element` are as in `activations`.
"""

from __future__ import annotations

from tunebook.config.choices import Checkpointing, Compute, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.facts.attention import attention_facts
from tunebook.facts.sharing import is_cast_by_deepspeed
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import of_layers
from tunebook.plan.memory.activations import (
    activation_bytes,
    adapted,
    attended_length,
    given_back_element,
    gives_back_fp32,
    has_dropout,
    inner_bytes_per_token,
    inputs_of_layers,
    is_on_inner,
    mask_bytes,
    mode_of,
    one_layer_bytes,
    saved_by_mode,
    stream_element,
    tokens_per_pass,
)
from tunebook.plan.memory.states import product_element

# Tensors that TRL's offloading lets go only when as many more are on their way, and the one that is (trl 1.16,
# activation_offloading.py); of these, what the last norm and product leave, in bytes of each hidden number.
_STASHED, _ON_THEIR_WAY = 6, 8
# Architectures whose feed-forward network is followed by a norm, by what the names of their classes begin with.
NORM_AFTER_INNER = ("Exaone4", "Gemma2", "Gemma3", "Glm4", "Olmo2", "Olmo3")
# Bytes of each inner number that an adapter on these has at work in the backward pass of a compiled layer.
_AT_WORK_OF_ADAPTERS = {"gate_proj": 4, "up_proj": 2, "gate_up_proj": 6}


def kept_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """Bytes that all layers keep on the device of one pass while the output head is computed.

    TRL's offloading leaves what is saved a second time while it is on its way, such as what goes into a norm.
    """
    inputs, mask = inputs_of_layers(config, facts), mask_bytes(config)
    if is_recomputed:
        stays = _STASHED / max(1, facts.num_layers) if config.activation.offload else 1.0
        return mask + inputs * min(1.0, stays)
    kept = activation_bytes(config, facts, is_recomputed=False)
    if not config.activation.offload:
        return mask + kept
    on_their_way = float(_ON_THEIR_WAY * tokens_per_pass(config) * facts.hidden_size)
    return mask + min(kept, _left_bytes(config, facts) + on_their_way)


def _left_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What offloading leaves of all layers, as runs on H200s had it, too (h200x2_held_out)."""
    tokens = tokens_per_pass(config)
    saved = saved_by_mode(config, facts.measured) if facts.measured is not None else {}
    # Dropout gives each adapter an input of its own, as autocast does: none is saved again while it is on its way.
    mode = mode_of(config, () if has_dropout(config) else saved)
    if found := saved.get(f"{mode}/offloaded"):
        fixed, each, pair = found[:3]
        under_zero3 = float(_left_under_zero3(config) * tokens * facts.num_layers * facts.hidden_size)
        return of_layers(facts, fixed + tokens * (each + pair * attended_length(config))) + under_zero3
    is_adapter, is_fp32 = config.peft.method is not PeftMethod.full, config.precision.compute is Compute.fp32
    is_eager = attention_facts(config).keeps_softmax
    if is_fp32:
        left = 8 if has_dropout(config) else 20
    elif is_adapter:
        left = 8
    else:
        left = 14 if stream_element(config) == 2 else 10
    # Kernels keep their output, as the product that reads it does; without one the product with the values keeps the
    # softmax in its own number format, which in fp32 is the softmax's once more.
    of_softmax = 4.0 * facts.num_attention_heads * attended_length(config) if is_eager and is_fp32 else 0.0
    if is_eager and left > 8:
        left -= product_element(config)
    left += _left_under_zero3(config)
    return tokens * facts.num_layers * (left * facts.hidden_size + of_softmax)


def _left_under_zero3(config: RunConfig) -> int:
    """What each norm gives to several products, which ZeRO-3's own keep uncast (traced on two H200, Qwen2.5-0.5B)."""
    is_full, is_bf16 = config.peft.method is PeftMethod.full, stream_element(config) == 2
    is_fp32 = config.precision.compute is Compute.fp32
    if not strategy_facts(config).is_zero3 or is_fp32 or (is_full and is_bf16):
        return 0
    return 2 * stream_element(config)


def forward_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What the last layer has at work in its forward pass besides what all keep.

    An adapter in fp32 on the inner product takes that so, and its dropout's output. What is offloaded is there as well
    until it has left: gate, up, their product and what comes of it.
    """
    is_fp32, tokens = config.precision.compute is Compute.fp32, tokens_per_pass(config)
    if config.activation.offload:
        inner = 20 if is_fp32 else (17 if has_dropout(config) else 12) if _is_widened(config) else 10
        at_work = tokens * (8.0 * facts.hidden_size + inner * facts.intermediate_size)
        return min(at_work, 2 * one_layer_bytes(config, facts))
    if config.model.compile_layers or config.peft.method is PeftMethod.full or not is_on_inner(config):
        return 0.0
    inner = 4 if is_fp32 else (10 if has_dropout(config) else 6) if _is_widened(config) else 2
    return float(tokens * inner * facts.intermediate_size)


def backward_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What the last layer has at work in its backward pass besides what all keep: gradients of its inner numbers.

    Of compiled layers only with adapters, and where selective checkpointing computes the product of gate and up again.
    """
    if config.activation.offload:
        return 0.0
    return max(_inner_backward_bytes(config, facts), _eager_backward_bytes(config, facts))


def _inner_backward_bytes(config: RunConfig, facts: ModelFacts) -> float:
    tokens, is_selective = tokens_per_pass(config), config.activation.checkpointing is Checkpointing.selective
    if computes_products_again(config):
        of_inner = _compiled_element(config, facts) * facts.intermediate_size
        return float(tokens * (stream_element(config) * facts.hidden_size + of_inner))
    if config.model.compile_layers:
        inner = _compiled_adapter_element(config, facts) if _is_adapter_in_16_bits(config) else 0
        return float(tokens * (inner + (2 if inner and is_selective else 0)) * facts.intermediate_size)
    if gives_back_fp32(config):
        return float(tokens * max(0, _four_bit_element(config) * facts.intermediate_size - 8 * facts.hidden_size))
    if _is_widened(config):
        return float(tokens * (6 * facts.hidden_size + 4 * facts.intermediate_size))
    return float(tokens * product_element(config) * facts.intermediate_size)


def _eager_backward_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What attention without a kernel has at work beside what its layer keeps, when its softmax's gradient is made.

    That softmax, its gradient, their product (of CUDA's kernel, which following without memory does not show) and its
    input's gradient are in fp32, whatever it was computed from. What of it the next product keeps in 16 bits is
    gone, and so is what the feed-forward network kept. Met on an H100 (h100_held_out).
    """
    if not attention_facts(config).keeps_softmax:
        return 0.0
    pairs = float(tokens_per_pass(config) * attended_length(config)) * facts.num_attention_heads
    gone = tokens_per_pass(config) * inner_bytes_per_token(config, facts) if facts.measured is None else 0.0
    return max(0.0, pairs * (12 if product_element(config) == 4 else 10) - gone)


def computes_products_again(config: RunConfig) -> bool:
    """Whether layers are compiled, trained whole and checkpointed selectively."""
    is_full = config.peft.method is PeftMethod.full
    is_selective = config.activation.checkpointing is Checkpointing.selective
    return is_full and is_selective and bool(config.model.compile_layers) and not config.activation.offload


def recomputed_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of a layer that is computed again, when its backward pass is at the inner numbers, or at eager attention.

    What it keeps, but for its input, which is counted with those of all layers; the gradient of its output; and
    gradients of inner numbers.
    """
    hidden, inner = _at_work_again(config, facts)
    at_inner = tokens_per_pass(config) * (hidden * facts.hidden_size + inner * facts.intermediate_size)
    return one_layer_bytes(config, facts) + max(0, at_inner, _eager_backward_bytes(config, facts))


def _at_work_again(config: RunConfig, facts: ModelFacts) -> tuple[int, int]:
    """Bytes of each hidden and of each inner number that a layer has beside what it keeps when it is computed again.

    Where nothing is compiled as tensors were followed: gate, its activation, up and two gradients at once, and of an
    adapter its dropout's output and what it is given in fp32. Runs on an H100 were met within 1.5% (h100_held_out).
    """
    stream, gradients = stream_element(config), 2 * product_element(config)
    is_adapter, drops = _is_adapter_in_16_bits(config), has_dropout(config)
    if config.model.compile_layers and is_adapter:  # fitted: see there
        return (4 if stream == 2 else 0), _compiled_adapter_element(config, facts)
    if config.model.compile_layers:
        return 0, _compiled_element(config, facts)
    if gives_back_fp32(config):  # fitted: see there
        return 16, _four_bit_element(config)
    # The gradient of its output, in place of its input among what it keeps: in bf16 a norm keeps what it makes of that.
    hidden = 0 if stream == 4 else stream
    if not is_adapter:
        return hidden, gradients
    if _is_widened(config):
        return hidden + stream + 6, gradients + (6 if drops else 2)
    if not is_on_inner(config):
        return hidden, gradients + 2
    return (hidden + stream + 6, gradients - 2) if drops else (hidden, gradients)


def _compiled_element(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of each inner number that compiled layers have at work beside what they keep, where some is computed again.

    The product of gate and up comes out of one kernel with two gradients, which are then not written over what is
    there: recorded on an H100 and on a CPU. A norm behind needs the product before, and then they are.
    """
    is_before = facts.architecture.startswith(NORM_AFTER_INNER)
    is_selective = config.activation.checkpointing is Checkpointing.selective  # which does not keep the product
    return ((4 if is_selective else 3) - (2 if is_before else 0)) * product_element(config)


def _compiled_adapter_element(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of each inner number that compiled layers with adapters have at work beside what they keep.

    Fitted to 25 runs of 3 and 5 layers of Qwen2.5-7B and Llama 3 8B on an H200 ("looked_at targets" and "drawn targets"
    of h200x2_held_out), which differ in what the adapters are on: two of the inner numbers' gradients, and beside what
    of them adapters read or give once more.
    """
    named = adapted(config, facts)
    of_adapters = sum(size for name, size in _AT_WORK_OF_ADAPTERS.items() if name in named)
    if gives_back_fp32(config):
        of_adapters += (2 if is_on_inner(config) else 1) - round(given_back_element(config, facts))
    return 4 + of_adapters - (2 if has_dropout(config) and is_on_inner(config) else 0)


def _four_bit_element(config: RunConfig) -> int:
    """Bytes of each inner number that layers of 4-bit weights have at work where those give back fp32.

    Fitted, with what compiled ones have more, to eight runs of 5 layers as wide as Qwen2.5-7B's (h200_quantised).
    """
    return 7 if is_on_inner(config) else 9


def _is_adapter_in_16_bits(config: RunConfig) -> bool:
    return config.peft.method is not PeftMethod.full and product_element(config) == 2


def _is_widened(config: RunConfig) -> bool:
    """Whether an adapter takes the inner numbers in fp32, as PEFT keeps it; FSDP and DeepSpeed may cast it to bf16.

    Beside 4-bit weights PEFT leaves that to autocast (0.21, tuners/lora/bnb.py).
    """
    is_adapter, is_16_bit = config.peft.method is not PeftMethod.full, config.precision.compute is not Compute.fp32
    is_cast = isinstance(config.parallelism, FsdpConfig) or is_cast_by_deepspeed(config)
    is_four_bit = config.peft.method is PeftMethod.qlora
    return is_adapter and is_16_bit and not is_cast and not is_four_bit and is_on_inner(config)


def last_offloaded_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What the first layer has brought back when the backward pass ends, and the gradients of its input.

    By two runs on H200s (h200x2_held_out): 0.30 GiB of 5 layers of Llama 3 8B, 0.48 of Qwen2.5-7B.
    """
    return 16.0 * tokens_per_pass(config) * facts.hidden_size if config.activation.offload else 0.0
