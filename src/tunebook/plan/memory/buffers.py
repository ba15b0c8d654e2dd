"""What a rank holds whole, in another number format, or on its way, at each of the moments in `moments`."""

from __future__ import annotations

from itertools import pairwise

from tunebook.config.choices import Checkpointing, Compute, MasterWeights, Offload, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, linear_layers
from tunebook.plan.memory.activations import OF_ATTENTION, head_gradient_bytes, unadapted
from tunebook.plan.memory.states import (
    FOUR_BIT_BYTES,
    divided_among,
    has_parameters_away,
    num_ranks,
    product_element,
    trained_element,
    weight_element,
)

# DeepSpeed's documentation of overlap_comm; 8.4 GiB were measured for 5e8 elements in fp32, of models of 0.5B and of
# 1.2B parameters (H200).
_OVERLAPPING_BUCKETS = 4.5
# Of those of frozen models what DeepSpeed allocates whatever is trained: 2.8 GiB of 8.4 with LoRA (Qwen2.5-3B, 4 H200).
_OVERLAPPING_BUCKETS_OF_ADAPTERS = 1.5
_LIVE_PARAMETERS = 1_000_000_000  # that DeepSpeed's ZeRO-3 keeps whole at most by default


def buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """Bytes of all of it while the output head is computed, when no layer is whole that is to be computed again."""
    is_whole_again = is_recomputed and not strategy_facts(config).keeps_gathered
    layers = 0.0 if is_whole_again else _gathered_ahead(config, facts)
    whole = _gathered(config, facts) + layers
    if _gathers_head_last(config, facts):
        whole = _head_unit_bytes(config, facts, has_arrived=True)
    return _cast(config, facts, is_recomputed) + whole + bucket_bytes(config, facts)


def forward_buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """The same in the last layer's forward pass, which FSDP has whole, and what arrived of it."""
    if not _gathers_head_last(config, facts):
        return buffer_bytes(config, facts, is_recomputed=is_recomputed)
    element, parameters = product_element(config), count_parameters(config, facts)
    keeps_all = strategy_facts(config).keeps_gathered
    layers = (facts.num_layers + 1 if keeps_all else 2) / max(1, facts.num_layers)
    return element * (parameters.layers * layers + (parameters.embeddings if keeps_all else 0))


def handing_on_buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """The same when the backward pass has begun, and the head's gradient is handed on.

    By then several ranks of FSDP have let go of what had arrived of it (torch 2.13, _fsdp_state.py, _post_forward).
    """
    if _gathers_head_last(config, facts):
        return _head_unit_bytes(config, facts, has_arrived=False)
    return buffer_bytes(config, facts, is_recomputed=is_recomputed)


def _gathers_head_last(config: RunConfig, facts: ModelFacts) -> bool:
    """Whether several ranks of FSDP train a head of its own, and make it whole after all layers, from wherever.

    accelerate (1.15, fsdp2_prepare_model) makes one unit of it and the last norm, which is not divided again before the
    backward pass, and one of the embeddings, which is treated as the layers are.
    """
    is_fsdp, is_full = isinstance(config.parallelism, FsdpConfig), config.peft.method is PeftMethod.full
    return is_fsdp and is_full and num_ranks(config) > 1 and not facts.tie_word_embeddings


def _head_unit_bytes(config: RunConfig, facts: ModelFacts, *, has_arrived: bool) -> float:
    """What is whole while such a head is: itself, what arrived of it if so, and what `fsdp_grad_op` keeps whole.

    Found block by block on two H100 (4 layers of Qwen2.5-14B and 6 of Qwen3-8B, both in bf16), with the weights on the
    host, too (6 layers of Qwen3-8B and 9 of Llama 3 8B). In the first pass after one without gradients torch 2.11, but
    not 2.13, reduces this unit after all others, for which 7.4 GiB were there instead of 5.3.
    """
    element, parameters = product_element(config), count_parameters(config, facts)
    kept = parameters.embeddings + parameters.layers if strategy_facts(config).keeps_gathered else 0.0
    return element * (kept + parameters.embeddings * (2 if has_arrived else 1))


def cleared_buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """The same just after, when autocast's cache is empty: copies that were not saved, or have left, are gone."""
    whole = buffer_bytes(config, facts, is_recomputed=is_recomputed)
    is_cleared = is_recomputed or config.activation.offload
    return whole - (_cast(config, facts, is_recomputed) if is_cleared else 0.0)


def backward_buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """The same in the last layer's backward pass, for which FSDP has two layers whole and the gradient of one."""
    cast = _cast_layer(config, facts) if is_recomputed else _cast(config, facts, is_recomputed)
    is_let_go = _are_units(config, facts) and config.peft.method is PeftMethod.full
    besides = 0.0 if is_let_go else _gathered(config, facts)
    besides += _layer_of_adapters(config, facts) if is_recomputed else 0.0
    return cast + besides + _gathered_layers(config, facts) + bucket_bytes(config, facts, is_backward=True)


def _layer_of_adapters(config: RunConfig, facts: ModelFacts) -> float:
    """One layer more, for several ranks of FSDP with adapters in bf16, of layers computed again that are not compiled.

    Measured and not traced: 0.9 and 1.0 layers of Llama 3.2 3B and Qwen3-8B with few tokens (two H200), none of
    Qwen2.5-14B with many (two H100). That FSDP has nothing that grows with the tokens was followed with torch 2.13 on a
    CPU, where no such layer was there either.
    """
    is_lora_in_bf16 = config.peft.method is PeftMethod.lora and weight_element(config) == 2
    is_spread = isinstance(config.parallelism, FsdpConfig) and num_ranks(config) > 1
    if not is_spread or not is_lora_in_bf16 or config.model.compile_layers:
        return 0.0
    return product_element(config) * count_parameters(config, facts).layers / max(1, facts.num_layers)


def reducing_layer_bytes(config: RunConfig, facts: ModelFacts, *, is_last: bool = False) -> float:
    """The same with FSDP in a later layer's backward pass, the first layer's if `is_last`: 0 where it sends nothing.

    What it sends of the layer before, in the format that gradients are summed in, is held until this one's are sent
    (torch 2.13, _fsdp_param_group.py). The layer and the next are whole, and its gradient; a head of its own, and its
    gradient, are gone by then. In trials of real FSDP 10.1 bytes for each of a layer's parameters, with bf16 products
    of fp32 weights (a Llama with a wide MLP and a Mixtral, tests/parallel/test_fsdp_moments.py).
    """
    layers = facts.num_layers
    is_full = config.peft.method is PeftMethod.full
    if not isinstance(config.parallelism, FsdpConfig) or not is_full or num_ranks(config) == 1 or layers < 2:
        return 0.0
    element = product_element(config)
    whole = 1 if is_last or layers == 2 else 2
    if strategy_facts(config).keeps_gathered and not is_last:
        whole = layers - 1
    parameters = count_parameters(config, facts)
    tied = element * parameters.embeddings if facts.tie_word_embeddings else 0
    return float((weight_element(config) + element * (whole + 1)) * parameters.layers / layers + tied)


def _cast(config: RunConfig, facts: ModelFacts, is_recomputed: bool) -> float:
    """Autocast's copies of the layers' weights, which the backward pass needs. Stacked experts have none.

    With activation checkpointing of whole layers they are there at the end of the forward pass, in autocast's cache,
    which holds nothing of frozen weights, nor what compiled blocks cast. FSDP gathers weights in bf16, and ZeRO-3's
    own product keeps no copy of a weight, which is gathered again: there is nothing to copy. On one GPU, where nobody
    gathers, it held as much as with copies (25.1 GiB of Dolly v2 3B, of which they are 4.7, on an H200).
    """
    layers, is_full = cast_copies_bytes(config, facts), config.peft.method is PeftMethod.full
    if not layers:
        return 0.0
    if config.activation.checkpointing is Checkpointing.selective:
        return layers / max(1, facts.num_layers)  # cast again for each layer
    if config.activation.offload and not is_full:
        return 0.0 if config.model.compile_layers else _copies_that_stay(config, facts)
    if not is_recomputed:
        return layers
    return layers if is_full and not config.model.compile_layers else 0.0


def _copies_that_stay(config: RunConfig, facts: ModelFacts) -> float:
    """Of the copies of frozen weights, which leave with the activations, those that TRL's offloading takes for gone.

    It knows a tensor by its address while it is on its way (trl 1.16, activation_offloading.py, pack_tensor). A weight
    is saved as the other way round, so that a copy of the copy leaves and its place is free: the next linear layer's
    copy, where it is as large and nothing but an activation was between, is put there, taken for it, and stays.
    Of OLMo-1B with adapters on attention it was one of gate and up in each layer (0.38 GiB of 4.6, H200).
    """
    sizes = _weight_sizes(facts)
    missing, stay = unadapted(config, facts), set[str]()
    for before, name in pairwise(sizes):
        is_next = before in missing and before not in stay and name not in OF_ATTENTION
        if is_next and sizes[before] == sizes[name]:
            stay.add(name)
    return 2.0 * facts.num_layers * sum(sizes[name] for name in stay)


def _weight_sizes(facts: ModelFacts) -> dict[str, float]:
    """Numbers in the weight of each linear layer of a layer, in the order in which it computes them."""
    if facts.measured is not None and facts.measured.adapters:
        layers = max(1, facts.measured.num_layers)
        return {name: inputs * outputs / layers**2 for name, (inputs, outputs) in facts.measured.adapters.items()}
    hidden = facts.hidden_size
    return {name: float(hidden * (both - hidden)) for name, both in linear_layers(facts).items()}


def cast_copies_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Of all layers, wherever they are."""
    return 2.0 * count_parameters(config, facts).linear if _casts(config) else 0.0


def _cast_layer(config: RunConfig, facts: ModelFacts) -> float:
    """Of one layer that is computed again."""
    return cast_copies_bytes(config, facts) / max(1, facts.num_layers)


def _casts(config: RunConfig) -> bool:
    """Whether weights are cast for products and kept so for the backward pass."""
    is_mixed = config.precision.compute is not Compute.fp32 and weight_element(config) == 4
    if not is_mixed or config.precision.master_weights is MasterWeights.bf16:
        return False
    if config.peft.method is PeftMethod.qlora or isinstance(config.parallelism, FsdpConfig):
        return False  # four bits are widened for each product and not kept
    return not strategy_facts(config).is_zero3 or config.model.compile_layers or num_ranks(config) == 1


def _gathered(config: RunConfig, facts: ModelFacts) -> float:
    """What is whole of a sharded or offloaded model besides its layers.

    FSDP gathers the embeddings and the output head once for a pass.
    """
    settings = config.parallelism
    if not _is_gathered(config):
        return 0.0
    if divided_among(config).weights == 1 and isinstance(settings, ZeroConfig):
        return _on_one_rank(config, facts)
    if strategy_facts(config).is_zero3:
        return kept_for_backward(config, facts)
    matrices = 1 if facts.tie_word_embeddings or _are_units(config, facts) else 2
    return float(product_element(config) * count_parameters(config, facts).embeddings * matrices)


def _are_units(config: RunConfig, facts: ModelFacts) -> bool:
    """Whether embeddings are whole only while they are looked up, and a head of its own while it is computed.

    accelerate (1.15, fsdp2_prepare_model) makes units of both. Slices of Qwen2.5-7B and Llama 3 8B on one rank held 2.0
    to 2.3 GiB less than with both (H200). Two ranks held as much as that: what arrived of the one is there until the
    next unit's has arrived, too (torch 2.13, _fsdp_param_group.py).
    """
    is_sharded = strategy_facts(config).is_fsdp and not strategy_facts(config).keeps_gathered
    return is_sharded and num_ranks(config) == 1 and not facts.tie_word_embeddings


def _gathered_ahead(config: RunConfig, facts: ModelFacts) -> float:
    """What FSDP has whole of the layers while the head is computed: one, on its way, or all that were gathered.

    One rank fetches nothing ahead (torch 2.13, _fsdp_param_group.py): slices of Qwen2.5-7B and Llama 3 8B had nothing
    of their layers there on an H100.
    """
    if strategy_facts(config).keeps_gathered:
        return _gathered_layers(config, facts)
    if num_ranks(config) == 1:
        return 0.0
    matrices = 3 if config.peft.method is PeftMethod.full else 2
    return _gathered_layers(config, facts) / matrices


def _gathered_layers(config: RunConfig, facts: ModelFacts) -> float:
    """What is whole of a sharded or offloaded model's layers: two of them, and the gradient of one.

    `fsdp_grad_op` keeps every layer that the forward pass has gathered (measured on 4 H200s: 84.8 GiB of Llama 3 8B).
    One rank with adapters fetches nothing ahead and has no gradients of what is frozen: one layer, and a matrix that
    arrives. With a head of its own, which stays gathered until the backward pass is over (`train.head_on_host`), that
    was 1.58 of the 1.64 GiB that 5 layers of Qwen2.5-7B had beside what was traced of activations (H200).
    What ZeRO-3 keeps is counted by `kept_for_backward`.
    """
    if not _is_gathered(config) or strategy_facts(config).is_zero3:
        return 0.0
    parameters, element = count_parameters(config, facts), product_element(config)
    in_four_bits = parameters.linear if config.peft.method is PeftMethod.qlora else 0  # and stays so when gathered
    whole = in_four_bits * FOUR_BIT_BYTES + (parameters.layers - in_four_bits) * element
    layer = whole / max(1, facts.num_layers)
    is_full = config.peft.method is PeftMethod.full
    if not is_full and num_ranks(config) == 1 and isinstance(config.parallelism, FsdpConfig):
        arriving: float = FOUR_BIT_BYTES if in_four_bits else _arriving_element(config)
        return layer + arriving * max(_weight_sizes(facts).values())
    return (layer if is_full else 0.0) + (whole if strategy_facts(config).keeps_gathered else 2 * layer)


def _is_gathered(config: RunConfig) -> bool:
    """Whether the model is sharded or offloaded, so that its parts are whole for a time only."""
    return divided_among(config).weights > 1 or has_parameters_away(config)


def kept_for_backward(config: RunConfig, facts: ModelFacts) -> float:
    """What ZeRO-3 has whole: parameters that are needed again within a billion others, its default, and the head.

    Not more than the layers and the head. Untied embeddings are not needed again.
    """
    head = count_parameters(config, facts).embeddings
    again = count_parameters(config, facts).layers + head
    return float(weight_element(config) * max(min(again, _live_parameters(config, facts)), head))


def _live_parameters(config: RunConfig, facts: ModelFacts) -> float:
    """How many ZeRO-3 keeps whole at most, by what was traced and measured on H200s.

    Trained whole: a billion in all where the shares are on the GPU (nine layers of Qwen2.5-3B and its head); where they
    are on the host half of that (12 layers of Qwen2.5-3B), or a billion beside a head of its own (4 layers of
    Qwen2.5-7B). With LoRA: a billion in bf16 (two layers of Phi-4 and its head) and where they are on the host (3.6 GiB
    of Qwen2.5-3B on two and on four); else what is passed twice within a billion (1.8 GiB of 12 layers of Qwen2.5-3B),
    of which a head of its own is passed once (3.5 GiB of 9 layers of Llama 3 8B).
    """
    parameters, is_away, half = count_parameters(config, facts), has_parameters_away(config), _LIVE_PARAMETERS / 2
    if config.peft.method is PeftMethod.full:
        beside = half + parameters.embeddings if is_away and not facts.tie_word_embeddings else 0.0
        return (half if is_away else _LIVE_PARAMETERS) + beside
    if is_away or weight_element(config) == 2:
        return _LIVE_PARAMETERS
    layer = parameters.layers / max(1, facts.num_layers)
    return half + (0.0 if facts.tie_word_embeddings else parameters.embeddings / 2 + layer)


def gathering_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What it takes on top to gather the output head: what arrives, and with ZeRO-3 a copy on its way to the parameter.

    Measured on two H200: 5.8 GiB for Qwen3-8B's 2.3 of embeddings under ZeRO-3, with which the peak was reached. With
    LoRA no layers were whole then. One rank of FSDP has what comes from its host beside the whole (4 layers of
    Qwen2.5-14B, H200). A head that is the embeddings has long been there for FSDP; not so where two ranks fetched it
    from the host (9 layers of Qwen2.5-3B with LoRA: 1.74 GiB at most). Where several ranks train a head of their own
    it is less than when the head is computed.
    """
    embeddings, element, ranks = count_parameters(config, facts).embeddings, weight_element(config), num_ranks(config)
    is_fsdp = isinstance(config.parallelism, FsdpConfig)
    is_there = is_fsdp and facts.tie_word_embeddings and (ranks == 1 or not has_parameters_away(config))
    if not _is_gathered(config) or is_there or (ranks == 1 and not is_fsdp) or _gathers_head_last(config, facts):
        return 0.0
    if is_fsdp:
        return float((_arriving_element(config) if ranks == 1 else product_element(config)) * embeddings)
    head, is_full = element * embeddings, config.peft.method is PeftMethod.full
    is_kept = is_full or has_parameters_away(config)
    return (1 + 1 / num_ranks(config)) * head - (0.0 if is_kept else kept_for_backward(config, facts) - head)


def first_gathering_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What one rank of FSDP takes to fetch the embeddings from its host when a pass begins; 0 elsewhere.

    What arrives, in the format of the weights and cast, and the whole. Eight layers of Gemma 3 4B, whose 671 million
    embeddings take 1.25 GiB in bf16, held 2.57 GiB at most (H100).
    """
    if not isinstance(config.parallelism, FsdpConfig) or num_ranks(config) > 1 or not has_parameters_away(config):
        return 0.0
    whole = product_element(config)
    return float((_arriving_element(config) + whole) * count_parameters(config, facts).embeddings)


def _arriving_element(config: RunConfig) -> int:
    """Bytes of each number that one rank of FSDP fetches from its host: as it is kept there, and cast if need be."""
    kept, whole = weight_element(config), product_element(config)
    return kept + (whole if kept != whole else 0)


def scattering_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What ZeRO-3 takes on top to send the output head's gradient to the ranks: in bf16, and each one's share in fp32.

    Measured on two H200, with Qwen2.5-14B's head: 2.9 GiB for a gradient of 2.9. An embedding that is the head has its
    gradient sent when the backward pass ends.
    """
    is_cast = config.precision.compute is not Compute.fp32
    if not strategy_facts(config).is_zero3 or facts.tie_word_embeddings or num_ranks(config) == 1:
        return 0.0
    return ((0.5 if is_cast else 0.0) + 1 / num_ranks(config)) * head_gradient_bytes(config, facts)


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
    settings, again = config.parallelism, 0
    if isinstance(settings, ZeroConfig) and settings.offload_parameters is Offload.nvme:
        again = count_parameters(config, facts).embeddings  # as if: 2 layers of Dolly v2 3B held 0.5 GiB more (H200)
    return weight_element(config) * (whole + again) + gradients + head


def root_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What FSDP takes on top of the shares when a backward pass ends: it reduces the embeddings last.

    Their gradient in fp32 on its way to the ranks, and as it was computed (9 layers of Llama 3 8B on two H200).
    """
    if not isinstance(config.parallelism, FsdpConfig) or config.peft.method is not PeftMethod.full:
        return 0.0
    return float(count_parameters(config, facts).trained_embeddings * (4 + product_element(config)))


def reducing_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """The buckets by which DeepSpeed's stages 1 and 2 reduce gradients, two of them where that overlaps.

    Made whole when a backward pass begins (0.19.8, stage_1_and_2.py, setup_buckets), however few gradients there are.
    """
    settings = config.parallelism
    is_stage_1_or_2 = strategy_facts(config).keeps_whole_weights
    if not isinstance(settings, ZeroConfig) or not is_stage_1_or_2 or settings.offload_optimizer is not Offload.none:
        return 0.0
    return float(weight_element(config) * _reduce_bucket(settings, facts) * (2 if settings.overlap_comm else 1))


def bucket_bytes(config: RunConfig, facts: ModelFacts, *, is_backward: bool = False) -> float:
    """What is on its way: DDP's buckets, those by which DeepSpeed moves gradients to the host, and ZeRO-3's.

    `is_backward`: while a backward pass is at work, for which DeepSpeed makes two whole ones, however few gradients
    there are (0.19.8, stage_1_and_2.py, setup_buckets).
    """
    settings, trained = config.parallelism, count_parameters(config, facts).trained
    if strategy_facts(config).averages_gradients and num_ranks(config) > 1:
        return float(trained * trained_element(config))  # together they are as large as all gradients
    if not isinstance(settings, ZeroConfig):
        return 0.0
    if strategy_facts(config).is_zero3:
        return weight_element(config) * _ahead(settings, facts)
    if settings.offload_optimizer is Offload.none:
        return 0.0
    of_adapters = 2.0 if is_backward else _OVERLAPPING_BUCKETS_OF_ADAPTERS
    overlapping = _OVERLAPPING_BUCKETS if config.peft.method is PeftMethod.full else of_adapters
    bucket = weight_element(config) * _reduce_bucket(settings, facts)
    return bucket * (overlapping if settings.overlap_comm else 1.0)


def _reduce_bucket(settings: ZeroConfig, facts: ModelFacts) -> int:
    """Elements of it; the Trainer's choice where nobody says."""
    return settings.reduce_bucket_size or facts.hidden_size**2


def _ahead(zero: ZeroConfig, facts: ModelFacts) -> float:
    """Elements that ZeRO-3 reduces and gathers ahead at once where that was typed; the Trainer's choices are small.

    By one run: Qwen2.5-3B on 4 H200 held 58.9 GiB with buckets of 2e8 and 2e9 live parameters; 49.8 are counted
    without this and 57.6 with it.
    """
    reduced = (zero.reduce_bucket_size or 0) * (1.0 if zero.overlap_comm is False else _OVERLAPPING_BUCKETS)
    live = max(0, min(zero.max_live_parameters or 0, facts.num_parameters) - _LIVE_PARAMETERS)
    return reduced + (zero.prefetch_bucket_size or 0) + live
