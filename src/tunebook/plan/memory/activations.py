"""What the forward pass keeps for the backward pass.

Counted for a decoder layer with two RMS norms, grouped-query attention and a gated feed-forward network, as
transformers 5.23 computes it; tests count the tensors that autograd really saves, and what torch's partitioner keeps
of compiled layers. Layers of other kinds bring numbers that were found on the meta device (`ModelFacts.measured`).
`hidden` and `inner` stand for one token's numbers of hidden_size and intermediate_size, `element` for the bytes of one
number in a product.
"""

from __future__ import annotations

from collections.abc import Collection

from tunebook.config.choices import (
    Checkpointing,
    Compute,
    MixedPrecision,
    PackingMode,
    PeftMethod,
)
from tunebook.config.model_facts import CAST, MeasuredLayers, ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.data.batch import PADDED_TOKENS_PER_PASS, largest_micro_batch
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT, COMPILED, COMPILED_BETA, MASKED, attention_facts
from tunebook.facts.sharing import is_cast_by_deepspeed
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import (
    EMBEDDINGS,
    HEADS,
    count_parameters,
    last_name,
    linear_layers,
    of_layers,
)
from tunebook.plan.memory.states import has_parameters_away, num_ranks, product_element, trained_element, weight_element

# TRL's output head works on tiles of this many tokens and words (trl 1.16, kernels/chunked_logprob.py); ours, which
# makes the gradients in the forward pass, on tiles of as many tokens and all words.
_HEAD_TOKENS, _HEAD_WORDS = 4096, 32768
# The linear layers of Llama's and other architectures by what they read: the outputs of a layer's two norms, of which
# each is read by several, of the attention, or the inner numbers.
_READERS = (
    frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}),
    frozenset({"gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "fc1", "fc_in", "c_fc"}),
)
OF_ATTENTION = frozenset({"o_proj", "dense", "out_proj"})
_OF_INNER = frozenset({"down_proj", "dense_4h_to_h", "fc2", "fc_out", "c_proj"})  # GPT-2's attention has a c_proj, too
_READING = OF_ATTENTION.union(_OF_INNER, *_READERS)
_ROUTER = "gate"  # PEFT takes it for a parameter, as it does stacked experts, beside which it is small


def activation_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """Bytes of all layers' activations for one pass, wherever they are kept.

    With activation checkpointing each layer keeps its input, and one layer at a time everything.
    """
    if is_recomputed:
        return inputs_of_layers(config, facts) + one_layer_bytes(config, facts)
    if measured := measured_bytes(config, facts):
        return measured[0]
    return facts.num_layers * one_layer_bytes(config, facts)


def inputs_of_layers(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of what goes into each layer, of one pass."""
    return float(tokens_per_pass(config) * facts.num_layers * stream_element(config) * facts.hidden_size)


def one_layer_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the activations of the layer that keeps most, for one pass."""
    if measured := measured_bytes(config, facts):
        return measured[1]
    return tokens_per_pass(config) * layer_bytes_per_token(config, facts)


def measured_bytes(config: RunConfig, facts: ModelFacts) -> tuple[float, float] | None:
    """What all layers keep of a pass, and the one that keeps most; None for layers that the formulas below are for."""
    if facts.measured is None:
        return None
    saved = saved_by_mode(config, facts.measured)
    compiled, mode = saved.get(_compiled_mode(config) or ""), mode_of(config, saved)
    numbers = compiled or saved.get(mode)
    if numbers is None:
        return None
    is_cast = compiled is None and mode.startswith(CAST)
    tokens, row = tokens_per_pass(config), attended_length(config)
    whole, largest = (fixed + tokens * (each + pair * row) for fixed, each, pair in (numbers[:3], numbers[3:]))
    besides = tokens * _besides_measured(config, facts, is_compiled=compiled is not None, is_cast=is_cast)
    return of_layers(facts, whole) + facts.num_layers * besides, largest + besides


def saved_by_mode(config: RunConfig, measured: MeasuredLayers) -> dict[str, list[int]]:
    """What was measured with adapters where a configuration puts them: on stacked experts, too, or beside them."""
    named, experts = _named(config), {*measured.expert_adapters}
    is_beside = named & (experts | {*measured.adapters}) and not named & (experts - {_ROUTER})
    return measured.saved | measured.saved_without_autocast | (measured.saved_beside_experts if is_beside else {})


def _besides_measured(config: RunConfig, facts: ModelFacts, *, is_compiled: bool, is_cast: bool) -> float:
    """Of one token and layer, what an adapter keeps more or less than one on every product, as it was measured.

    A dropout of compiled layers was measured with them. `is_cast`: without autocast, where inputs are handed on as they
    are.
    """
    assert facts.measured is not None
    less = _dropout_bytes(config, unadapted(config, facts))
    if is_compiled:
        return -less - _unadapted_bytes(config, facts)
    all_dropout = of_layers(facts, facts.measured.linear_inputs) / max(1, facts.num_layers)
    dropout = max(0.0, all_dropout - less) if has_dropout(config) else 0.0
    if is_cast:
        more = dropout + _dropped_bytes(config, facts, is_handed_on=True)
        return more - _unadapted_bytes(config, facts, is_handed_on=True)
    more = dropout + _dropped_bytes(config, facts) + _inputs_under_zero3(config, facts)
    more += given_back_element(config, facts) * facts.intermediate_size
    return more - _unadapted_bytes(config, facts) - _spared_bytes(config, facts)


def _spared_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Copies that adapters were measured to keep each for itself and do not where inputs are handed on as they are."""
    if not _hands_on(config):
        return 0.0
    hidden = {name: size for name, size in linear_inputs(facts).items() if name not in _OF_INNER}
    groups = [[hidden[name] for name in readers if name in hidden] for readers in _READERS]
    return 2.0 * (sum(hidden.values()) - sum(max(sizes) for sizes in groups if sizes))


def _compiled_mode(config: RunConfig) -> str | None:
    """The key of `MeasuredLayers.saved` for compiled layers; None where they are not, or not as they were measured.

    That was with torch's kernel for packed rows, and in one piece each, as ZeRO-3's hooks do not leave them.
    """
    is_by_lengths = config.attention.implementation in (COMPILED, COMPILED_BETA)
    is_whole = not strategy_facts(config).is_zero3
    if not (config.model.compile_layers and is_by_lengths and is_whole):
        return None
    method = "dropout" if has_dropout(config) else _method(config)
    is_selective = config.activation.checkpointing is Checkpointing.selective
    return f"{_number_format(config)}/{method}/{'selective' if is_selective else 'compiled'}"


def _number_format(config: RunConfig) -> str:
    if config.precision.compute is Compute.fp32:
        return "fp32"
    return "bf16" if stream_element(config) == 2 else "autocast"


def _method(config: RunConfig) -> str:
    return "full" if config.peft.method is PeftMethod.full else "adapter"


def mode_of(config: RunConfig, saved: Collection[str]) -> str:
    """The key of `MeasuredLayers.saved` for layers that are not compiled.

    Without autocast that under it, which keeps more, where facts that somebody has stated know no other.
    """
    kernel = config.attention.implementation
    if kernel is BY_DOCUMENT:
        kernel = MASKED  # which counts a mask too many
    way = f"{_method(config)}/{kernel.name if ATTENTIONS[kernel].repeats_heads else 'flash'}"
    cast = CAST + way
    return cast if cast in saved and _is_without_autocast(config) else f"{_number_format(config)}/{way}"


def _is_without_autocast(config: RunConfig) -> bool:
    """Whether nothing casts in 16 bits, since weights, adapters and what goes between layers are all in the same.

    One GPU and DDP have autocast over bf16 weights, too, under which norms of some architectures give out fp32 and each
    product has a copy of its own; FSDP and DeepSpeed have not. ZeRO-3's product and bitsandbytes' are counted by what
    they do.
    """
    is_16_bit = config.precision.compute is not Compute.fp32 and stream_element(config) == 2
    facts, is_qlora = strategy_facts(config), config.peft.method is PeftMethod.qlora
    return is_16_bit and not is_qlora and not facts.is_copied and not facts.is_zero3


def tokens_per_pass(config: RunConfig) -> int:
    """Tokens of one micro batch whose rows are full; where its size is left open, of the largest that may be taken."""
    rows = config.training.micro_batch_size
    if rows is None and config.packing.mode is PackingMode.padded:
        rows = _padded_rows(config)
    return max(1, rows or 1) * _row_length(config)


def _padded_rows(config: RunConfig) -> int:
    samples, length = config.training.global_samples, config.training.max_length
    ranks = num_ranks(config)
    if samples is None or samples < ranks:
        return PADDED_TOKENS_PER_PASS // max(1, length)
    return largest_micro_batch(samples // ranks, length)


def layer_bytes_per_token(config: RunConfig, facts: ModelFacts) -> float:
    """What one layer keeps of one token."""
    element = product_element(config)
    norms = _norm_bytes(config) * facts.hidden_size
    of_dropout = _dropout_bytes(config, adapted(config, facts)) + _dropped_bytes(config, facts)
    inputs = of_dropout + _inputs_under_zero3(config, facts)
    inner = inner_bytes_per_token(config, facts)
    return norms + inner + _attention_bytes(config, facts, element) + inputs - _unadapted_bytes(config, facts)


def inner_bytes_per_token(config: RunConfig, facts: ModelFacts) -> float:
    """What of that the feed-forward network keeps of its inner numbers, but for what adapters on it do."""
    element = product_element(config)
    inner = 4.0 * element * facts.intermediate_size  # gate, its activation, up, their product
    if config.activation.checkpointing is Checkpointing.selective:
        inner = 2.0 * element * facts.intermediate_size  # gate and up; in fp8, too (Qwen2.5-3B and Llama 3 8B, H200)
    elif config.model.liger_kernel or config.model.compile_layers:
        inner = 3.0 * element * facts.intermediate_size  # the activation is computed again
        if config.precision.compute is Compute.fp8 and config.model.compile_layers:
            inner /= 2  # fitted to one run: Llama 3 8B kept 11 GiB less on each of two H200 than bf16 is counted for
    return inner + given_back_element(config, facts) * facts.intermediate_size


def gives_back_fp32(config: RunConfig) -> bool:
    """Whether products of 4-bit weights give their output in the fp32 that norms hand them, and not in autocast's bf16.

    So does bitsandbytes' layer (0.50.2, nn/modules.py, Linear4bit.forward), whose numbers are no operation of autocast.
    """
    is_16_bit = config.precision.compute is not Compute.fp32
    return config.peft.method is PeftMethod.qlora and is_16_bit and stream_element(config) == 4


def given_back_element(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of each inner number that gate, its activation and up take more in fp32.

    Compiled layers keep what adapters add to, and of others less than is counted elsewhere: fitted to four runs of five
    layers as wide as Qwen2.5-7B's and Llama 3 8B's (h200_quantised).
    """
    if not gives_back_fp32(config):
        return 0.0
    if config.model.compile_layers:
        return 3.0 if _READERS[1] & ({*linear_inputs(facts)} - {*unadapted(config, facts)}) else -1.0
    return 4.0 if config.model.liger_kernel else 6.0


def _norm_bytes(config: RunConfig) -> float:
    """Of both norms and of the five products that read their outputs, per number of the hidden size."""
    is_adapter = config.peft.method is not PeftMethod.full
    if config.activation.checkpointing is Checkpointing.selective:
        # The block's input, and what its attention adds to that; both norms are computed again.
        return stream_element(config) + product_element(config)
    if config.model.compile_layers:
        # Of both norms the input and the output; where the input is fp32, one of the outputs is cast from it again.
        # Not in fp8 nor with ZeRO-3, whose hooks cut blocks into pieces, as the peaks that were measured say.
        element = product_element(config)
        is_whole = config.precision.compute is Compute.bf16 and not strategy_facts(config).is_zero3
        is_cast = is_whole and stream_element(config) == 4
        outputs = 1 if is_cast and not is_adapter else 2
        return 2 * stream_element(config) + outputs * element
    if config.precision.compute is Compute.fp32:
        return 16 if is_adapter else 24  # input, normalised input (for the norm's own weight), output
    if stream_element(config) == 2:  # the input in fp32; of what is trained normalised; the output
        return 16 if not is_adapter else 12 if _hands_on(config) else 20
    inputs = 8 if is_adapter or config.model.liger_kernel else 16  # the input and, normalised, once more
    return inputs + (12 if is_adapter else 10)  # autocast casts the output anew for each product


def _hands_on(config: RunConfig) -> bool:
    """Whether adapters keep what they are given, and not, each for itself, what it is cast to or its dropout leaves.

    PEFT widens it to the adapter's fp32, from which autocast casts it again; not so beside 4-bit weights, nor where
    FSDP gathers adapters in bf16 or DeepSpeed has cast them.
    """
    method = config.peft.method
    is_narrow = method is PeftMethod.qlora or (method is PeftMethod.lora and _is_without_autocast(config))
    is_bf16 = product_element(config) == stream_element(config) == 2
    return is_narrow and is_bf16 and not has_dropout(config) and not config.model.compile_layers


def _attention_bytes(config: RunConfig, facts: ModelFacts, element: int) -> float:
    """Query, key, value, output, and what the kernel keeps of the mask."""
    row, heads = attended_length(config), facts.num_attention_heads
    kernel = attention_facts(config)
    repeated = heads if kernel.repeats_heads else facts.num_key_value_heads
    key_width = facts.hidden_size * repeated / max(1, heads)
    kept = element * (2 * facts.hidden_size + 2 * key_width)
    if kernel.keeps_softmax:
        # The softmax in fp32, and again in the number format of the product where that is another.
        return kept + heads * row * (4 if element == 4 else 4 + element)
    if kernel.keeps_documents:
        kept += element * facts.hidden_size  # the output of each document, and once more in one piece
    if kernel.mask_bytes:
        kept += element * row  # one mask per layer, added to the scores of all heads
    return kept


def _inputs_under_zero3(config: RunConfig, facts: ModelFacts) -> float:
    """What the inputs of products take more than elsewhere: ZeRO-3 has a product of its own, which keeps them as given.

    That is uncast, and also where the weight is frozen (deepspeed 0.19, runtime/zero/linear.py). Where DeepSpeed casts
    the whole model, adapters are in bf16 as well, and nothing needs a cast. A test runs DeepSpeed's product.
    """
    method = config.peft.method
    if not strategy_facts(config).is_zero3 or config.model.compile_layers or method is PeftMethod.qlora:
        return 0.0
    hidden, inner = facts.hidden_size, facts.intermediate_size
    is_fp32, has_drop = config.precision.compute is Compute.fp32, has_dropout(config)
    if method is PeftMethod.full:  # one norm's output for several products, where autocast casts it for each
        return 0.0 if is_fp32 or stream_element(config) == 2 else -2.0 * hidden
    if is_fp32:
        return 8.0 * hidden + 4.0 * inner if has_drop else 0.0
    if is_cast_by_deepspeed(config):
        return 4.0 * hidden + 2.0 * inner if has_drop else -8.0 * hidden
    products = _products_of_hidden(facts) * hidden
    if stream_element(config) == 2:
        return 4.0 * hidden + 2.0 * products + 4.0 * inner
    return (8.0 * hidden + 2.0 * products if has_drop else 12.0 * hidden - 2.0 * products) + 4.0 * inner


def _products_of_hidden(facts: ModelFacts) -> float:
    """How many products of a layer read hidden numbers: six of Llama's, of those that are fused fewer."""
    if facts.measured is None:
        return 6.0
    inputs = of_layers(facts, facts.measured.linear_inputs) / max(1, facts.num_layers) - facts.intermediate_size
    return min(6.0, max(0.0, inputs / max(1, facts.hidden_size)))


def _dropout_bytes(config: RunConfig, inputs: dict[str, float]) -> float:
    """A byte for each number that an adapter's dropout has looked at: the inputs of the products that it is put on.

    Compiled blocks keep another for what six of them read; not so those that compute some of it again. With bf16
    weights they kept two more of one of these (Llama 3 8B, H200).
    """
    if not has_dropout(config):
        return 0.0
    kept = 1.0
    if config.model.compile_layers and config.activation.checkpointing is not Checkpointing.selective:
        kept = 14 / 6 if stream_element(config) == 2 else 2.0
    return sum(size if name in _OF_INNER else kept * size for name, size in inputs.items())


def _dropped_bytes(config: RunConfig, facts: ModelFacts, *, is_handed_on: bool = False) -> float:
    """In fp32, what dropout leaves of each input that without it is kept once for all that read it, or by attention.

    In 16 bits adapters keep an input each for itself anyway, as it was cast; not so where it is handed on as it is.
    """
    is_handed_on = is_handed_on or config.precision.compute is Compute.fp32
    if not is_handed_on or not has_dropout(config) or config.model.compile_layers:
        return 0.0
    inputs = adapted(config, facts)
    groups = [[inputs[name] for name in readers if name in inputs] for readers in _READERS]
    shared = sum(max(sizes) for sizes in groups if sizes)
    kept_for_each = sum(size for name, size in inputs.items() if name not in _OF_INNER)
    return product_element(config) * (kept_for_each - shared)


def _unadapted_bytes(config: RunConfig, facts: ModelFacts, *, is_handed_on: bool = False) -> float:
    """Of products that an adapter is not put on: their inputs, which only the gradient of a weight needs.

    In 16 bits each product has a copy of its own, but in compiled blocks. In those and in fp32 what read one norm's
    output share it; the output of the attention is in fp32 the one that its kernel keeps, and where inputs are handed
    on as they are. Of products whose input is not known by their name nothing is counted there. Blocks that compute
    some of it again keep none of them anyway, and ZeRO-3's product those of frozen weights, too. Tests count what
    autograd saves and what torch's partitioner keeps.
    """
    missing, is_selective = unadapted(config, facts), config.activation.checkpointing is Checkpointing.selective
    if not missing or is_selective or strategy_facts(config).is_zero3:
        return 0.0
    is_handed_on = is_handed_on or config.precision.compute is Compute.fp32 or _hands_on(config)
    every = linear_inputs(facts)
    if not is_handed_on and not config.model.compile_layers:
        return 2.0 * sum(missing.values())
    sharing = [readers & {*every} for readers in _READERS]
    shared = sum(max(every[name] for name in names) for names in sharing if names and names <= {*missing})
    alone = _OF_INNER if is_handed_on else _OF_INNER | OF_ATTENTION
    return product_element(config) * (shared + sum(size for name, size in missing.items() if name in alone))


def linear_inputs(facts: ModelFacts) -> dict[str, float]:
    """Numbers of one token that go into a layer's products, by their names: in the mean of layers that were measured.

    As Llama's where nobody has looked at the names.
    """
    if facts.measured is not None and facts.measured.adapters:
        sizes = facts.measured.adapters.items()
        return {name: of_layers(facts, inputs) / max(1, facts.num_layers) for name, (inputs, _) in sizes}
    hidden, inner = float(facts.hidden_size), float(facts.intermediate_size)
    return {name: inner if name in _OF_INNER else hidden for name in linear_layers(facts)}


def unadapted(config: RunConfig, facts: ModelFacts) -> dict[str, float]:
    """Of `linear_inputs`, what LoRA is not put on; nothing where nobody knows it by the names that were typed.

    PEFT passes over what an architecture does not have, as Phi-4 has no q_proj, where it has another of the names.
    """
    every, named = linear_inputs(facts), _named(config)
    measured, others = facts.measured, {*EMBEDDINGS, *HEADS}
    if measured is not None and measured.adapters:
        is_known = not named.isdisjoint({*every, *measured.expert_adapters, *others})
    else:
        is_known = named <= {*every, *others}
    if config.peft.method is PeftMethod.full or not named or not is_known:
        return {}
    return {name: size for name, size in every.items() if name not in named}


def adapted(config: RunConfig, facts: ModelFacts) -> dict[str, float]:
    """Of `linear_inputs`, all others."""
    missing = unadapted(config, facts)
    return {name: size for name, size in linear_inputs(facts).items() if name not in missing}


def _named(config: RunConfig) -> set[str]:
    return {last_name(module) for module in config.peft.target_modules}


def is_on_inner(config: RunConfig) -> bool:
    """Whether an adapter is put on the product that reads the inner numbers; so it is where that is not known."""
    named = _named(config)
    return config.peft.method is PeftMethod.full or not named or not named <= _READING - _OF_INNER


def has_dropout(config: RunConfig) -> bool:
    """Whether an adapter drops some of its inputs."""
    return config.peft.method is not PeftMethod.full and config.peft.dropout > 0


def head_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """The last norm, the output head's tiles and, where it is trained, its gradient in fp32."""
    element = product_element(config)
    tokens = tokens_per_pass(config)
    words = facts.vocab_size if config.model.one_pass_head else min(facts.vocab_size, _HEAD_WORDS)
    tile = min(tokens, _HEAD_TOKENS) * words * element
    # TRL's part of it is counted where it needs no cast, too, as the peaks that were measured are met so.
    is_cast = stream_element(config) != element or not config.model.one_pass_head
    if config.model.one_pass_head and isinstance(config.parallelism, FsdpConfig):
        is_adapter = config.peft.method is not PeftMethod.full
        is_cast = is_cast and is_adapter and not has_parameters_away(config)  # else gathered in bf16
    weight = words * facts.hidden_size * element if is_cast else 0
    return tile + weight + after_head_bytes(config, facts)


def after_head_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What is left of the head when the layers' backward pass begins: the last norm's, and the head's gradient."""
    return 16.0 * tokens_per_pass(config) * facts.hidden_size + head_gradient_bytes(config, facts)


def head_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """The output head's gradient, with which the backward pass begins: in fp32, and nothing where it is frozen."""
    return 4.0 * count_parameters(config, facts).trained_head


def left_head_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """The same when it is handed on: in the format of the weight, which with FSDP is what is gathered."""
    element = trained_element(config)
    if isinstance(config.parallelism, FsdpConfig):
        element = min(element, product_element(config))
    return head_gradient_bytes(config, facts) * element / 4


def stream_element(config: RunConfig) -> int:
    """Bytes of a number between the layers: what the weights are in when a layer sees them."""
    settings = config.parallelism
    is_cast = isinstance(settings, FsdpConfig) and settings.mixed_precision is MixedPrecision.cast
    return 2 if is_cast and config.precision.compute is not Compute.fp32 else weight_element(config)


def mask_bytes(config: RunConfig) -> float:
    """The mask that all layers are handed: of each token a number for every other, where a kernel is given one."""
    stated = attention_facts(config).mask_bytes
    element = product_element(config) if stated is None else stated
    return float(element * tokens_per_pass(config) * attended_length(config))


def attended_length(config: RunConfig) -> int:
    """Tokens that a mask or a softmax holds for each: packed rows of a pass are put one behind the other as one."""
    return _row_length(config) if config.packing.mode is PackingMode.padded else tokens_per_pass(config)


def _row_length(config: RunConfig) -> int:
    return config.packing.row_length or config.training.max_length
