"""What a rank holds whole, or in another number format, while the backward pass begins."""

from __future__ import annotations

from tunebook.config.choices import Checkpointing, Compute, MasterWeights, Offload, PeftMethod, Strategy
from tunebook.config.estimate.activations import head_gradient_bytes, one_layer_bytes
from tunebook.config.estimate.parameters import count_parameters
from tunebook.config.estimate.states import (
    FOUR_BIT_BYTES,
    divided_among,
    num_ranks,
    state_bytes,
    weight_element,
)
from tunebook.config.schema import FsdpConfig, ModelFacts, RunConfig, ZeroConfig

# DeepSpeed's documentation of overlap_comm; 8.4 GiB were measured for 5e8 elements in fp32, of models of 0.5B and of
# 1.2B parameters (H200).
_OVERLAPPING_BUCKETS = 4.5
# Of those of frozen models what DeepSpeed allocates whatever is trained: 2.8 GiB of 8.4 with LoRA (Qwen2.5-3B, 4 H200).
_OVERLAPPING_BUCKETS_OF_ADAPTERS = 1.5
_LIVE_PARAMETERS = 1_000_000_000  # that DeepSpeed's ZeRO-3 keeps whole at most by default


def buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """All of it, in bytes."""
    return _cast(config, facts, is_recomputed) + _gathered(config, facts) + bucket_bytes(config, facts)


def _cast(config: RunConfig, facts: ModelFacts, is_recomputed: bool) -> float:
    """Autocast's copies of the layers' weights, which the backward pass needs.

    With activation checkpointing of whole layers they are there at the end of the forward pass, in autocast's cache,
    which holds nothing of frozen weights. It is empty when the backward pass begins, so only what they take more than
    a layer's activations and the head's gradient counts. FSDP gathers weights in bf16: there is nothing to copy.
    """
    is_mixed = config.precision.compute is not Compute.fp32 and weight_element(config) == 4
    if not is_mixed or config.precision.master_weights is MasterWeights.bf16:
        return 0.0
    if config.peft.method is PeftMethod.qlora or isinstance(config.parallelism, FsdpConfig):
        return 0.0  # four bits are widened for each product and not kept
    layers = count_parameters(config, facts).layers
    if config.activation.checkpointing is Checkpointing.selective:
        return 2.0 * layers / max(1, facts.num_layers)  # cast again for each layer
    if config.parallelism.strategy is Strategy.zero3 and config.peft.method is not PeftMethod.full:
        return 0.0  # its product keeps no copy of a weight, which is gathered again
    if not is_recomputed:
        return 2.0 * layers
    if config.peft.method is not PeftMethod.full:
        return 2.0 * layers / max(1, facts.num_layers)  # one at a time
    return max(0.0, 2.0 * layers - one_layer_bytes(config, facts) - head_gradient_bytes(config, facts))


def _gathered(config: RunConfig, facts: ModelFacts) -> float:
    """What is whole of a sharded or offloaded model: the embeddings and two layers, and the gradient of one layer.

    `fsdp_grad_op` keeps every layer that the forward pass has gathered (measured on 4 H200s: 84.8 GiB of Llama 3 8B).
    Where ZeRO-3 keeps the shares on the GPU, it held as much as they take once more (measured on H200s: 22.8 GiB with
    them and 11.3 with parameters on the host, of 12 layers of Qwen2.5-3B; as much again with LoRA). Where the output
    head has a weight of its own, its gradient is there once more on its way to the other ranks (measured offloaded, of
    4 layers of Qwen2.5-7B: 2.5 GiB, and 2.0 are counted).
    """
    settings = config.parallelism
    is_away = isinstance(settings, ZeroConfig | FsdpConfig) and settings.offload_parameters is not Offload.none
    if divided_among(config).weights == 1 and not is_away:
        return 0.0
    if divided_among(config).weights == 1 and isinstance(settings, ZeroConfig):
        return _on_one_rank(config, facts)
    if settings.strategy is Strategy.zero3 and config.peft.method is PeftMethod.lora:
        return _kept_for_backward(config, facts, is_away=is_away)
    parameters = count_parameters(config, facts)
    embeddings = parameters.embeddings * (1 if facts.tie_word_embeddings else 2)
    layer = parameters.layers / max(1, facts.num_layers)
    gradients = layer if config.peft.method is PeftMethod.full else 0
    again = 0.0
    if settings.strategy is Strategy.zero3:  # however many ranks share them
        kept = 0.0 if is_away else _kept_for_backward(config, facts, is_away=False)
        again = max(state_bytes(config, facts).weights, kept)
    if isinstance(settings, ZeroConfig) and not facts.tie_word_embeddings:
        again += head_gradient_bytes(config, facts)
    element = 4 if config.precision.compute is Compute.fp32 else 2
    layers = element * 2 * layer
    if settings.strategy is Strategy.fsdp_grad_op:
        is_four_bit = config.peft.method is PeftMethod.qlora  # and stays so when it is gathered
        in_four_bits = parameters.linear if is_four_bit else 0
        layers = in_four_bits * FOUR_BIT_BYTES + (parameters.layers - in_four_bits) * element
    return again + layers + element * (embeddings + gradients)


def _kept_for_backward(config: RunConfig, facts: ModelFacts, *, is_away: bool) -> float:
    """What ZeRO-3 has whole: the parameters that are needed again within a billion others, its default.

    Half of these, of the last layers, as the backward pass begins: with LoRA 1.8 GiB of 12 layers of Qwen2.5-3B. With
    LoRA and parameters on the host it kept as many as it may: 3.6 GiB of the whole model on two and on four H200.
    """
    live = _LIVE_PARAMETERS if is_away else _LIVE_PARAMETERS / 2
    return weight_element(config) * min(facts.num_parameters, live)


def _on_one_rank(config: RunConfig, facts: ModelFacts) -> float:
    """What is whole of a model that ZeRO-3 offloads from a single GPU, and the gradients of a layer and of the head.

    With nobody to gather from, DeepSpeed copies its parameters as they are, where several ranks send them in the format
    of the products; and what comes again soon it keeps. On a CPU all of a small model was whole when the second
    backward pass began. Two slices of Dolly v2 3B on an H200 held 2.4 GiB more than without this, of 0.89B parameters,
    and about as much as with it (h200x2_recipes.jsonl).
    """
    whole = min(facts.num_parameters, _LIVE_PARAMETERS)  # what more was typed is counted with the buckets
    layer = count_parameters(config, facts).layers / max(1, facts.num_layers)
    gradients = weight_element(config) * layer if config.peft.method is PeftMethod.full else 0.0
    head = 0.0 if facts.tie_word_embeddings else head_gradient_bytes(config, facts)
    return weight_element(config) * whole + gradients + head


def bucket_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What is on its way: DDP's buckets, those by which DeepSpeed moves gradients to the host, and ZeRO-3's."""
    settings, trained = config.parallelism, count_parameters(config, facts).trained
    if settings.strategy is Strategy.ddp and num_ranks(config) > 1:
        return float(trained * weight_element(config))  # together they are as large as all gradients
    if not isinstance(settings, ZeroConfig):
        return 0.0
    if settings.strategy is Strategy.zero3:
        return weight_element(config) * _ahead(settings, facts)
    if settings.offload_optimizer is Offload.none:
        return 0.0
    bucket = settings.reduce_bucket_size or facts.hidden_size**2  # the Trainer's choice where nobody says
    overlapping = _OVERLAPPING_BUCKETS if config.peft.method is PeftMethod.full else _OVERLAPPING_BUCKETS_OF_ADAPTERS
    return weight_element(config) * bucket * (overlapping if settings.overlap_comm else 1.0)


def _ahead(zero: ZeroConfig, facts: ModelFacts) -> float:
    """Elements that ZeRO-3 reduces and gathers ahead at once where that was typed; the Trainer's choices are small.

    By one run: Qwen2.5-3B on 4 H200 held 58.9 GiB with buckets of 2e8 and 2e9 live parameters; 49.8 are counted
    without this and 57.6 with it.
    """
    reduced = (zero.reduce_bucket_size or 0) * (1.0 if zero.overlap_comm is False else _OVERLAPPING_BUCKETS)
    live = max(0, min(zero.max_live_parameters or 0, facts.num_parameters) - _LIVE_PARAMETERS)
    return reduced + (zero.prefetch_bucket_size or 0) + live
