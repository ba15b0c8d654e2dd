"""Activation memory that the forward pass keeps for the backward pass, from the traced numbers of the model's layers.

`plan.architecture` traces each architecture with LoRA on every linear layer, without dropout and without DeepSpeed.
This module adds or subtracts what a run does differently, per token and layer: adapters on some linear layers only,
dropout, 4-bit weights, Liger's kernels and ZeRO-3's own linear function. `hidden` and `inner` are the sizes of the
model; `element` is the number of bytes of one number in a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tunebook.config.choices import Checkpointing, Compute, PackingMode, PeftMethod
from tunebook.config.model_facts import CAST, OFFLOADED, TILED, MeasuredLayers, ModelFacts
from tunebook.config.schema import RunConfig, data_ranks
from tunebook.data.batch import PADDED_TOKENS_PER_PASS, largest_micro_batch
from tunebook.data.mean_length import longest_document
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT, COMPILED, COMPILED_BETA, MASKED, attention_facts
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import (
    EMBEDDINGS,
    HEADS,
    MLP_INPUT_LAYERS,
    MLP_OUTPUT_LAYERS,
    attention_width,
    is_named_like_llama,
    last_name,
    linear_layers,
    of_layers,
)
from tunebook.plan.memory.states import bytes_per_compute_value, bytes_per_hidden_value, experts_are_cast

# Linear layers, grouped by their input: the output of a layer's first or second norm, which several layers share, the
# output of the attention, or the inner numbers.
SHARED_INPUT_LAYERS = (
    frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}),
    MLP_INPUT_LAYERS,
)
ATTENTION_OUTPUT_LAYERS = frozenset({"o_proj", "dense", "out_proj"})
_KNOWN_LAYERS = ATTENTION_OUTPUT_LAYERS.union(MLP_OUTPUT_LAYERS, *SHARED_INPUT_LAYERS)
_ROUTER = "gate"  # small


def is_tiled(config: RunConfig) -> bool:
    """Whether MLPs are computed in more than one tile."""
    tile = config.activation.mlp_tile_tokens
    return tile is not None and tokens_per_pass(config) > tile


def kept_by_layers(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that all layers keep for one pass without activation checkpointing, on the GPU or offloaded."""
    return _kept(config, facts)[0]


def kept_by_one_layer(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that the layer with the largest activations keeps for one pass."""
    return _kept(config, facts)[1]


def inputs_of_layers(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the inputs of all layers, which activation checkpointing keeps."""
    return float(tokens_per_pass(config) * facts.num_layers * bytes_per_hidden_value(config) * facts.hidden_size)


def per_layer_inputs_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of numbers that are computed before the first layer, once for all layers.

    Their norm keeps its input in fp32, and what its weight multiplies if that is trained; the layers keep their shares.
    """
    kept = (8 if config.peft.method is PeftMethod.full else 4) + bytes_per_hidden_value(config)
    return tokens_per_pass(config) * kept * of_layers(facts, traced_layers(facts).per_layer_inputs)


def left_by_offloading(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that TRL's activation offloading leaves on the GPU: tensors saved again during their copy."""
    saved = _saved(config, traced_layers(facts))
    mode = _mode(config, saved)
    if has_dropout(config):  # each adapter has its own input, as under autocast: none is saved twice
        kernel = mode.rpartition("/")[2]
        mode = f"{'bf16' if bytes_per_hidden_value(config) == 2 else 'autocast'}/adapter/{kernel}"
    nothing = (0,) * 6
    pair = saved.get(f"{_mode(config, saved)}/{OFFLOADED}", nothing)[2]  # fp32 softmax, with or without dropout
    fixed, each = saved.get(f"{mode}/{OFFLOADED}", nothing)[:2]
    tokens = tokens_per_pass(config)
    return of_layers(facts, fixed + tokens * (each + pair * attended_length(config))) + _zero3_left_by_offloading(
        config, facts
    )


def _zero3_left_by_offloading(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of norm outputs, which ZeRO-3's linear function saves once for each layer that reads them."""
    is_full, is_bf16 = config.peft.method is PeftMethod.full, bytes_per_hidden_value(config) == 2
    is_fp32 = config.precision.compute is Compute.fp32
    if not strategy_facts(config).is_zero3 or is_fp32 or (is_full and is_bf16):
        return 0.0
    return 2.0 * bytes_per_hidden_value(config) * tokens_per_pass(config) * facts.num_layers * facts.hidden_size


def _kept(config: RunConfig, facts: ModelFacts) -> tuple[float, float]:
    """Bytes that all layers keep, and bytes that the largest layer keeps."""
    if is_tiled(config):
        facts = _without_mlps(facts)
    measured = traced_layers(facts)
    saved = _saved(config, measured)
    compiled = saved.get(_compiled_mode(config) or "")
    mode = _mode(config, saved)
    numbers: Sequence[int] = compiled or saved.get(mode) or (0,) * 6
    tokens, row = tokens_per_pass(config), attended_length(config)
    if config.attention.implementation is BY_DOCUMENT:
        row = 0  # this kernel needs no mask
    is_cast = compiled is None and mode.startswith(CAST)
    if experts_are_cast(config, facts):
        key = (_compiled_mode(config) or "") if compiled else mode
        numbers = _with_cast_experts(facts, numbers, saved.get(key.replace("autocast", "bf16")), bool(compiled))
    whole, largest = (fixed + tokens * (each + pair * row) for fixed, each, pair in (numbers[:3], numbers[3:]))
    more = tokens * sum(_differences(config, facts, is_compiled=compiled is not None, is_cast=is_cast))
    return of_layers(facts, whole) + facts.num_layers * more, largest + more


# How many bytes per hidden number a dense layer of Llama's or Qwen's build keeps more in fp32 than in 16 bits, outside
# of its products: the difference of the traces. Layers of other builds have at most this, so the plan is not too low.
_WIDE_STREAM, _WIDE_STREAM_COMPILED = 10, 2


def _with_cast_experts(
    facts: ModelFacts, numbers: Sequence[int], in_16_bits: Sequence[int] | None, is_compiled: bool
) -> Sequence[int]:
    """The traced numbers of layers with fp32 experts, with those of 16-bit experts in their place."""
    if in_16_bits is None:
        return numbers
    stream = (_WIDE_STREAM_COMPILED if is_compiled else _WIDE_STREAM) * facts.hidden_size
    whole = min(numbers[1], in_16_bits[1] + traced_layers(facts).num_layers * stream)
    return [numbers[0], whole, *numbers[2:4], min(numbers[4], in_16_bits[4] + stream), numbers[5]]


def _without_mlps(facts: ModelFacts) -> ModelFacts:
    """Layers whose MLPs keep their inputs only."""
    measured = traced_layers(facts)

    def tiled(saved: dict[str, list[int]]) -> dict[str, list[int]]:
        return {mode: saved[f"{mode}/{TILED}"] for mode in saved if f"{mode}/{TILED}" in saved}

    of_mlps = MLP_INPUT_LAYERS | MLP_OUTPUT_LAYERS
    adapters = {name: sizes for name, sizes in measured.adapters.items() if name not in of_mlps}
    return replace(
        facts,
        intermediate_size=0,
        measured=replace(
            measured,
            adapters=adapters,
            linear_inputs=sum(inputs for inputs, _ in adapters.values()),
            saved=tiled(measured.saved),
            saved_without_autocast=tiled(measured.saved_without_autocast),
            saved_beside_experts=tiled(measured.saved_beside_experts),
        ),
    )


def traced_layers(facts: ModelFacts) -> MeasuredLayers:
    """What was traced of a model's layers."""
    assert facts.measured is not None, "memory is estimated of traced layers only"
    return facts.measured


def _saved(config: RunConfig, measured: MeasuredLayers) -> dict[str, list[int]]:
    """The traced numbers by mode, for the configured placement of adapters: on stacked experts or not."""
    is_beside = not _adapts_experts(config, measured)
    return measured.saved | measured.saved_without_autocast | (measured.saved_beside_experts if is_beside else {})


def _adapts_experts(config: RunConfig, measured: MeasuredLayers) -> bool:
    """Whether adapters are on stacked experts, as they are if no name matches: PEFT then gets all layers."""
    named, experts = _adapted_names(config), {*measured.expert_adapters}
    return not named & (experts | {*measured.adapters}) or bool(named & (experts - {_ROUTER}))


def trains_experts(config: RunConfig, facts: ModelFacts) -> bool:
    """Whether the experts are trained, or have adapters; those that PEFT cannot adapt are frozen."""
    measured = traced_layers(facts)
    if config.peft.method is PeftMethod.full:
        return True
    return bool({*measured.expert_adapters} - {_ROUTER}) and _adapts_experts(config, measured)


def _compiled_mode(config: RunConfig) -> str | None:
    """The key of the traced numbers of compiled layers; None if the layers are not compiled or no trace matches.

    The traces use torch's kernel for packed rows.
    """
    if not config.model.compile_layers or config.attention.implementation not in (COMPILED, COMPILED_BETA):
        return None
    method = "dropout" if has_dropout(config) else _method(config)
    is_selective = config.activation.checkpointing is Checkpointing.selective
    return f"{number_format_of(config)}/{method}/{'selective' if is_selective else 'compiled'}"


def _mode(config: RunConfig, saved: Collection[str]) -> str:
    """The key of the traced numbers of layers that are not compiled.

    A mode without a trace falls back to the most similar traced mode: first under autocast, then with another kernel.
    """
    kernel = config.attention.implementation
    if kernel is BY_DOCUMENT:
        kernel = MASKED
    method, number_format = _method(config), number_format_of(config)
    kernels = dict.fromkeys((kernel.name if ATTENTIONS[kernel].repeats_heads else "flash", "flash", "sdpa", "eager"))
    formats = [number_format, *(["bf16", "autocast"] if number_format != "fp32" else [])]
    cast = [f"{CAST}{method}/{next(iter(kernels))}"] if _is_without_autocast(config) else []
    wanted = [*cast, *(f"{each}/{method}/{one}" for one in kernels for each in dict.fromkeys(formats))]
    return next((mode for mode in wanted if mode in saved), wanted[len(cast)])


def number_format_of(config: RunConfig) -> str:
    """The number format of weights and products, by the name that the traces have for it."""
    if config.precision.compute is Compute.fp32:
        return "fp32"
    return "bf16" if bytes_per_hidden_value(config) == 2 else "autocast"


def _method(config: RunConfig) -> str:
    return "full" if config.peft.method is PeftMethod.full else "adapter"


def _is_without_autocast(config: RunConfig) -> bool:
    """Whether weights, adapters and activations are all in 16 bits, so that nothing is cast.

    One GPU and DDP run autocast over bf16 weights, under which some norms return fp32. ZeRO-3's linear function and
    bitsandbytes' layers have corrections of their own.
    """
    is_16_bit = config.precision.compute is not Compute.fp32 and bytes_per_hidden_value(config) == 2
    facts, is_qlora = strategy_facts(config), config.peft.method is PeftMethod.qlora
    return is_16_bit and not is_qlora and not facts.is_copied and not facts.is_zero3


def _differences(config: RunConfig, facts: ModelFacts, *, is_compiled: bool, is_cast: bool) -> Iterator[float]:
    """Differences in bytes per token and layer between a run and the trace.

    `is_cast`: the trace has no autocast, so that linear layers read their inputs uncast.
    """
    missing = inputs_without_adapter(config, facts)
    if config.parallelism.sequence_group_size > 1:  # the kernel keeps its output, and the next layer the exchanged one
        yield float(bytes_per_compute_value(config) * attention_width(facts))
    if is_compiled:  # the trace includes dropout if the run has it
        yield -_dropout_masks(config, missing)
        yield -_input_bytes_without_adapter(config, facts, missing)
        yield fp32_bytes_of_four_bit_layers(config, facts) * mlp_width(facts)
        yield from _compiled_differences(config, facts)
        return
    inputs = of_layers(facts, traced_layers(facts).linear_inputs) / max(1, facts.num_layers)
    yield max(0.0, has_dropout(config) * inputs - _dropout_masks(config, missing))
    yield _dropout_outputs(config, facts, is_shared=is_cast)
    yield -_input_bytes_without_adapter(config, facts, missing, is_shared=is_cast)
    if not is_cast:
        yield _zero3_input_bytes(config, facts)
        yield fp32_bytes_of_four_bit_layers(config, facts) * mlp_width(facts)
        yield -_shared_input_bytes(config, facts)
        yield -_recomputed_by_liger(config, facts)
    if attention_facts(config).keeps_documents:  # each document's output, and their concatenation
        yield float(bytes_per_compute_value(config) * attention_width(facts))


def _compiled_differences(config: RunConfig, facts: ModelFacts) -> Iterator[float]:
    """Corrections for compiled layers that are not one graph of bf16 products, from measured peaks.

    ZeRO-3's hooks and fp8's casts break the graph. The output of a norm is then kept in fp32 and as a cast copy. In
    fp8, gate, up and their product are kept in 8 bits (eight runs of Qwen2.5-3B and Llama 3 8B, h200_memory).
    """
    is_fp8, element = config.precision.compute is Compute.fp8, bytes_per_compute_value(config)
    # Over bf16 weights the trace of a layer like Llama's keeps one hidden state more than norms, attention and inner
    # numbers need, and more than GPUs do: without it the mean error of 17 runs is 0.7% instead of 3.2%.
    if _compiled_mode(config) == "bf16/adapter/compiled" and is_named_like_llama(facts):
        yield float(-element * facts.hidden_size)
    if config.activation.checkpointing is Checkpointing.selective or not (is_fp8 or strategy_facts(config).is_zero3):
        return
    if config.peft.method is PeftMethod.full and bytes_per_hidden_value(config) > element:
        yield float(element * facts.hidden_size)
    if is_fp8:
        yield -1.5 * element * mlp_width(facts)


def _recomputed_by_liger(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes that Liger's kernels recompute instead of keeping (liger_kernel 0.8, ops/).

    Its SwiGLU recomputes the activation of gate, its norm the normalized input.
    """
    if not config.model.liger_kernel:
        return 0.0
    has_normalized = config.peft.method is PeftMethod.full and bytes_per_hidden_value(config) == 4
    is_autocast = config.precision.compute is not Compute.fp32
    norms = 8.0 * facts.hidden_size if has_normalized and is_autocast else 0.0
    return norms + bytes_per_compute_value(config) * mlp_width(facts)


def _shared_input_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of input copies that the trace has and the run does not.

    The trace has one copy for each adapter. A run makes none if adapters read the inputs as they are.
    """
    if not _adapters_share_inputs(config):
        return 0.0
    hidden = {name: size for name, size in linear_inputs(facts).items() if name not in MLP_OUTPUT_LAYERS}
    groups = [[hidden[name] for name in readers if name in hidden] for readers in SHARED_INPUT_LAYERS]
    return 2.0 * (sum(hidden.values()) - sum(max(sizes) for sizes in groups if sizes))


def _adapters_share_inputs(config: RunConfig) -> bool:
    """Whether adapters keep their shared input, not a cast or dropped-out copy each.

    PEFT casts the input to the adapter's fp32 and autocast casts it back. This does not happen for 4-bit weights, nor
    if FSDP gathers the adapters in bf16 or DeepSpeed has cast them.
    """
    method = config.peft.method
    is_narrow = method is PeftMethod.qlora or (method is PeftMethod.lora and _is_without_autocast(config))
    is_bf16 = bytes_per_compute_value(config) == bytes_per_hidden_value(config) == 2
    return is_narrow and is_bf16 and not has_dropout(config) and not config.model.compile_layers


def four_bit_layers_return_fp32(config: RunConfig) -> bool:
    """Whether 4-bit linear layers return the fp32 format of their input (bitsandbytes 0.50.2, Linear4bit)."""
    is_16_bit = config.precision.compute is not Compute.fp32
    return config.peft.method is PeftMethod.qlora and is_16_bit and bytes_per_hidden_value(config) == 4


def fp32_bytes_of_four_bit_layers(config: RunConfig, facts: ModelFacts) -> float:
    """Additional bytes of gate, its activation and up in fp32, per inner number.

    Compiled layers keep only what adapters add to (four runs of 5 layers of Qwen2.5-7B and Llama 3 8B, h200_quantised).
    """
    if not four_bit_layers_return_fp32(config):
        return 0.0
    if config.model.compile_layers:
        return (
            3.0
            if SHARED_INPUT_LAYERS[1] & ({*linear_inputs(facts)} - {*inputs_without_adapter(config, facts)})
            else -1.0
        )
    return 4.0 if config.model.liger_kernel else 6.0


def _zero3_input_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Additional bytes of linear-layer inputs under ZeRO-3, whose linear function keeps its inputs uncast.

    It saves them before autocast casts them, even if the weight is frozen (deepspeed 0.19.8, runtime/zero/linear.py).
    Over 16-bit weights DeepSpeed casts the whole model, adapters included. Each adapter then keeps only the output of
    its dropout (llama2_70b_lora_mlperf in h100_models.jsonl).
    """
    method = config.peft.method
    if not strategy_facts(config).is_zero3 or config.model.compile_layers or method is PeftMethod.qlora:
        return 0.0
    hidden, inner = facts.hidden_size, mlp_width(facts)
    is_fp32, has_drop = config.precision.compute is Compute.fp32, has_dropout(config)
    if method is PeftMethod.full:  # several layers share one norm output; autocast casts it for each
        return 0.0 if is_fp32 or bytes_per_hidden_value(config) == 2 else -2.0 * hidden
    if is_fp32:
        return 8.0 * hidden + 4.0 * inner if has_drop else 0.0
    inputs = of_layers(facts, traced_layers(facts).linear_inputs) / max(1, facts.num_layers) - inner
    products = max(0.0, inputs)
    if (
        bytes_per_hidden_value(config) == 2
    ):  # nothing is cast: norms' outputs are kept once, the attention's by its kernel
        without_adapter = sum(inputs_without_adapter(config, facts).values())
        return (
            4.0 * hidden + 2.0 * inner - 2.0 * without_adapter if has_drop else -2.0 * max(0.0, products - 2 * hidden)
        )
    of_norms, of_attention = 8.0 * hidden, 4.0 * attention_width(facts)
    return (of_norms + 2.0 * products if has_drop else of_norms + of_attention - 2.0 * products) + 4.0 * inner


def _dropout_masks(config: RunConfig, inputs: dict[str, float]) -> float:
    """Bytes of dropout masks: one byte for each input number of the linear layers with an adapter.

    Compiled layers keep a second byte for hidden-size inputs, unless selective checkpointing recomputes some of it.
    """
    if not has_dropout(config):
        return 0.0
    kept = 1.0
    if config.model.compile_layers and config.activation.checkpointing is not Checkpointing.selective:
        kept = 2.0
    return sum(size if name in MLP_OUTPUT_LAYERS else kept * size for name, size in inputs.items())


def _dropout_outputs(config: RunConfig, facts: ModelFacts, *, is_shared: bool) -> float:
    """Bytes of dropout outputs whose input is kept once: shared by adapters, or kept by the attention.

    Under autocast each adapter keeps its own copy anyway, unless inputs are read uncast (`is_shared`).
    """
    is_shared = is_shared or config.precision.compute is Compute.fp32
    if not is_shared or not has_dropout(config) or config.model.compile_layers:
        return 0.0
    inputs = inputs_with_adapter(config, facts)
    groups = [[inputs[name] for name in readers if name in inputs] for readers in SHARED_INPUT_LAYERS]
    shared = sum(max(sizes) for sizes in groups if sizes)
    return bytes_per_compute_value(config) * (
        sum(size for name, size in inputs.items() if name not in MLP_OUTPUT_LAYERS) - shared
    )


def _input_bytes_without_adapter(
    config: RunConfig, facts: ModelFacts, missing: dict[str, float], *, is_shared: bool = False
) -> float:
    """Bytes of the inputs of linear layers without an adapter, which only a weight gradient would need.

    Under autocast each layer has its own copy. Compiled layers, and those that read inputs uncast, share the output of
    a norm. In fp32 the attention kernel already keeps the output of the attention. Layers with selective checkpointing
    keep no inputs; ZeRO-3's linear function keeps all of them.
    """
    is_selective = config.activation.checkpointing is Checkpointing.selective
    if not missing or is_selective or strategy_facts(config).is_zero3:
        return 0.0
    is_shared = is_shared or config.precision.compute is Compute.fp32 or _adapters_share_inputs(config)
    every = linear_inputs(facts)
    if not is_shared and not config.model.compile_layers:
        return 2.0 * sum(missing.values())
    sharing = [readers & {*every} for readers in SHARED_INPUT_LAYERS]
    shared = sum(max(every[name] for name in names) for names in sharing if names and names <= {*missing})
    alone = MLP_OUTPUT_LAYERS if is_shared else MLP_OUTPUT_LAYERS | ATTENTION_OUTPUT_LAYERS
    return bytes_per_compute_value(config) * (shared + sum(size for name, size in missing.items() if name in alone))


def linear_inputs(facts: ModelFacts) -> dict[str, float]:
    """Number of inputs per token of each linear layer of a decoder layer, by name."""
    return {name: inputs for name, (inputs, _) in linear_layers(facts).items()}


def mlp_width(facts: ModelFacts) -> float:
    """Inner numbers per token between linear layers: those of shared experts only, if tokens are sent to experts."""
    if not traced_layers(facts).experts_per_token:
        return facts.intermediate_size
    return sum(size for name, size in linear_inputs(facts).items() if name in MLP_OUTPUT_LAYERS)


def inputs_without_adapter(config: RunConfig, facts: ModelFacts) -> dict[str, float]:
    """`linear_inputs` of the layers without LoRA; empty if the configured names are unknown.

    PEFT ignores a name that the architecture lacks, if it has another of the names.
    """
    every, named, measured = linear_inputs(facts), _adapted_names(config), traced_layers(facts)
    is_known = bool(every) and not named.isdisjoint({*every, *measured.expert_adapters, *EMBEDDINGS, *HEADS})
    if config.peft.method is PeftMethod.full or not is_known:
        return {}
    return {name: size for name, size in every.items() if name not in named}


def inputs_with_adapter(config: RunConfig, facts: ModelFacts) -> dict[str, float]:
    """`linear_inputs` of the layers with LoRA."""
    missing = inputs_without_adapter(config, facts)
    return {name: size for name, size in linear_inputs(facts).items() if name not in missing}


def _adapted_names(config: RunConfig) -> set[str]:
    return {last_name(module) for module in config.peft.target_modules}


def adapts_mlp_output(config: RunConfig) -> bool:
    """Whether the layer that reads the inner numbers has, or may have, an adapter, or everything is trained."""
    named = _adapted_names(config)
    return config.peft.method is PeftMethod.full or not named or not named <= _KNOWN_LAYERS - MLP_OUTPUT_LAYERS


def has_dropout(config: RunConfig) -> bool:
    """Whether adapters use dropout."""
    return config.peft.method is not PeftMethod.full and config.peft.dropout > 0


def mask_bytes(config: RunConfig) -> float:
    """Bytes of the attention mask, shared by all layers: one number per pair of tokens, if the kernel takes a mask."""
    stated = attention_facts(config).mask_bytes
    element = bytes_per_compute_value(config) if stated is None else stated
    return float(element * tokens_per_pass(config) * attended_length(config))


def attended_length(config: RunConfig) -> int:
    """Tokens that a mask or a softmax holds per token; the packed rows of a pass are concatenated into one row."""
    return _row_length(config) if config.packing.mode is PackingMode.padded else tokens_per_pass(config)


def tokens_per_pass(config: RunConfig) -> int:
    """Tokens of one micro batch with full rows on one rank; an unset size counts as the largest that may be chosen."""
    rows = config.training.micro_batch_size
    if rows is None and config.packing.mode is PackingMode.padded:
        rows = _padded_rows(config)
    return math.ceil((rows or 1) * _row_length(config) / config.parallelism.sequence_group_size)


def _padded_rows(config: RunConfig) -> int:
    samples, length = config.training.global_samples, config.training.max_length
    ranks = data_ranks(config)
    if samples is None or samples < ranks:
        return PADDED_TOKENS_PER_PASS // max(1, length)
    return largest_micro_batch(samples // ranks, length)


def _row_length(config: RunConfig) -> int:
    """Tokens of a row: a packed one is full, a padded one as long as the longest document at most."""
    row = config.packing.row_length or config.training.max_length
    return min(row, longest_document(config)) if config.packing.mode is PackingMode.padded else row
