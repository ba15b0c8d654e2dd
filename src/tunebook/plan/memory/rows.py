"""The ledger of a training step: states, gradients, activations, and what the strategy gathers, casts and sends.

The strategies were read in torch 2.13 (distributed/fsdp/_fully_shard), accelerate 1.15 (fsdp2_prepare_model) and
deepspeed 0.19.8 (runtime/zero). Measured numbers name their runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Compute, Offload, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig, world_size
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, looked_up_parameters
from tunebook.plan.memory.activations import activations_of, is_recomputed
from tunebook.plan.memory.ledger import Kind, Ledger, Moment, Row
from tunebook.plan.memory.states import (
    FOUR_BIT_BYTES,
    States,
    bytes_per_compute_value,
    bytes_per_hidden_value,
    bytes_per_trained_weight,
    bytes_per_weight,
    offloads_parameters,
    reduced_gradient_bytes,
    shard_counts,
    state_bytes,
    step_gradient_bytes,
)

# Number of buckets that stages 1 and 2 hold with an offloaded optimizer and overlap_comm: 4.5 by DeepSpeed's
# documentation. With adapters, recorded runs held 1.5, and 2 in a backward pass, which allocates two (setup_buckets).
_OVERLAPPING, _OVERLAPPING_ADAPTERS, _OVERLAPPING_ADAPTERS_BACKWARD = 4.5, 1.5, 2.0
_LIVE_PARAMETERS = 1_000_000_000  # most parameters that ZeRO-3 keeps gathered by default


def step_ledger(config: RunConfig, facts: ModelFacts, *, accumulates: bool) -> Ledger:
    """The memory of a step. `accumulates`: whether gradients of earlier passes of the step exist."""
    states = state_bytes(config, facts)
    rows = [
        Row("weights", Kind.weights, states.weights, Moment.start, Moment.step),
        Row("optimizer state", Kind.optimizer, states.optimizer, Moment.start, Moment.step),
        *_gradient_rows(config, facts, states, accumulates=accumulates),
        *_activation_rows(config, accumulates=accumulates),
        *_buffer_rows(config, facts),
    ]
    return Ledger([row for row in rows if row.num_bytes > 0])


def _activation_rows(config: RunConfig, *, accumulates: bool) -> Iterator[Row]:
    """Rows of what the fake step found."""
    for moment, found in activations_of(config, accumulates=accumulates).at.items():
        yield Row("activations", Kind.activations, found.live - found.gradients, moment, moment)
        yield Row("gradients so far", Kind.gradients, found.gradients, moment, moment)


def _gradient_rows(config: RunConfig, facts: ModelFacts, states: States, *, accumulates: bool) -> Iterator[Row]:
    """Rows of gradients of earlier passes and of this pass, and of DeepSpeed's additional gradient buffers.

    ZeRO-3 allocates one buffer for all gradients at the start. ZeRO-2 allocates a buffer for a pass's gradients before
    it adds them up, and keeps the first pass's buffer. ZeRO-1 allocates it at the end of the last pass.
    """
    strategy, whole = strategy_facts(config), reduced_gradient_bytes(config, facts)
    if not strategy.divides_gradients:  # every rank holds all, as the fake step counts them
        earlier = states.gradients if accumulates else 0.0
        yield Row("gradients of earlier passes", Kind.gradients, earlier, Moment.start, Moment.sent)
        yield Row("gradient buffer of the rank", Kind.buffers, whole, Moment.end, Moment.end)
        stepping = step_gradient_bytes(config, facts)
        yield Row("gradients", Kind.gradients, states.gradients, Moment.step, Moment.step)
        yield Row("copies of gradients", Kind.buffers, max(0.0, stepping - states.gradients), Moment.step, Moment.step)
        return
    if strategy.is_zero and not facts.tie_word_embeddings:
        head = 4.0 * count_parameters(config, facts).trained_head
        yield Row("gradient of the head in fp32", Kind.activations, head, Moment.reduce, Moment.reduce)
    earlier = states.gradients if accumulates or strategy.is_zero3 else 0.0
    yield Row("gradients of earlier passes", Kind.gradients, earlier, Moment.start, Moment.sent)
    if strategy.zero_stage == 2 and whole:
        spare = whole - states.gradients
        yield Row("gradient buffer of the pass", Kind.gradients, states.gradients, Moment.reduce, Moment.sent)
        yield Row("unused part of the gradient buffer", Kind.buffers, spare, Moment.reduce, Moment.last)
        yield Row(
            "unused part of the first pass's gradient buffer",
            Kind.buffers,
            spare * accumulates,
            Moment.start,
            Moment.last,
        )
    else:
        yield from _new_gradient_rows(config, facts, states, earlier)
        yield Row("gradient buffer of the rank", Kind.buffers, whole, Moment.end, Moment.sent)
    if config.peft.method is PeftMethod.full and not strategy.is_fsdp and (accumulates or not strategy.is_copied):
        looked_up = float(looked_up_parameters(facts) * bytes_per_trained_weight(config))  # before it is added or sent
        yield Row("gradient of other embeddings", Kind.activations, looked_up, Moment.end, Moment.sent)
    stepping = step_gradient_bytes(config, facts)
    gradients = min(states.gradients, stepping)
    yield Row("gradients", Kind.gradients, gradients, Moment.step, Moment.step)
    yield Row("flattened and fp32 copies of gradients", Kind.buffers, stepping - gradients, Moment.step, Moment.step)


def _new_gradient_rows(config: RunConfig, facts: ModelFacts, states: States, earlier: float) -> Iterator[Row]:
    """Rows of this pass's gradients, first of all layers, then also of the embeddings."""
    if earlier:
        return
    parameters, trained = count_parameters(config, facts), states.gradients
    later = 0.0 if facts.tie_word_embeddings else parameters.trained_embeddings * states.bytes_per_gradient
    if _reduces_layers(config, facts):
        share, layer = trained / max(1, parameters.trained), parameters.layers / facts.num_layers
        head = 0 if facts.tie_word_embeddings else parameters.trained_head
        done = share * (head + layer)
        yield Row("gradients of the head and a layer", Kind.gradients, done, Moment.middle, Moment.middle)
        later = share * (parameters.trained_embeddings + layer)  # the first layer's is counted as it is computed
    early = max(0.0, trained - later)
    yield Row("gradients of the layers and the head", Kind.gradients, early, Moment.first, Moment.sent)
    yield Row("gradients that come last", Kind.gradients, trained - early, Moment.end, Moment.sent)


# Buffers


def _buffer_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    """Yield all buffer rows of the strategy."""
    strategy = strategy_facts(config)
    if strategy.is_fsdp:
        yield from _fsdp_rows(config, facts)
    elif strategy.is_zero:
        yield from _zero_rows(config, facts)
    elif strategy.averages_gradients and world_size(config) > 1:  # DDP's buckets together are as large as all gradients
        buckets = float(count_parameters(config, facts).trained * bytes_per_trained_weight(config))
        yield _row("DDP's buckets", buckets, Moment.start, Moment.end)


def _row(label: str, num_bytes: float, since: Moment, until: Moment) -> Row:
    return Row(label, Kind.buffers, num_bytes, since, until)


# FSDP


def _reduces_layers(config: RunConfig, facts: ModelFacts) -> bool:
    """Whether FSDP reduces one layer's gradients while it computes the next layer's."""
    is_full, is_fsdp = config.peft.method is PeftMethod.full, isinstance(config.parallelism, FsdpConfig)
    return is_full and is_fsdp and world_size(config) > 1 and facts.num_layers > 1


def _fsdp_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    yield from _fsdp_backward_rows(config, facts)
    if shard_counts(config).weights == 1 and not offloads_parameters(config):
        return
    looked_up = float(bytes_per_compute_value(config) * looked_up_parameters(facts))  # in the root: it stays gathered
    yield _row("gathered other embeddings", looked_up, Moment.forward, Moment.end)
    if config.peft.method is PeftMethod.full and world_size(config) > 1 and not facts.tie_word_embeddings:
        yield from _head_unit_rows(config, facts)
        return
    yield from _embedding_rows(config, facts)
    is_cast = bytes_per_hidden_value(config) != bytes_per_compute_value(config)
    if is_cast and not _is_full(config) and config.model.one_pass_head and not offloads_parameters(config):
        cast = float(bytes_per_compute_value(config) * count_parameters(config, facts).embeddings)
        yield _row("cast weight of the head", cast, Moment.head, Moment.head)
    yield _row("gathered layers", _prefetched_layer_bytes(config, facts), Moment.forward, Moment.reduce)


def _embedding_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    """Rows of the embeddings and the head, of which accelerate makes units; `_head_unit_rows` is for the other case.

    One rank holds one unit at a time. On several ranks the last unit stays until the next one has arrived: the
    embeddings until the last layer, then the buffer in which the head came, until its backward pass. A tied head is one
    unit with the last norm.
    """
    ranks, element = world_size(config), bytes_per_compute_value(config)
    is_offloaded, is_tied, is_full = offloads_parameters(config), facts.tie_word_embeddings, _is_full(config)
    keeps_all = strategy_facts(config).keeps_gathered
    matrix = float(element * count_parameters(config, facts).embeddings)
    fetched = matrix * _fetched_bytes_per_weight(config) / element
    if ranks == 1 and is_offloaded:
        yield _row("embeddings fetched from the host", fetched + matrix, Moment.start, Moment.start)
    is_one_at_a_time = ranks == 1 and not is_tied and not keeps_all
    until = Moment.reduce if is_one_at_a_time and is_full else Moment.last
    if is_tied and is_full and ranks > 1:
        until = Moment.first
    yield _row("gathered embeddings and output head", matrix, Moment.forward, until)
    if not is_tied and not is_one_at_a_time:
        until = Moment.last if keeps_all else Moment.reduce
        yield _row("embeddings, or gather buffer of the output head", matrix, Moment.forward, until)
    is_gathered = (ranks == 1 or not is_offloaded) if is_tied else ranks > 1  # an untied one in both rows above
    arriving = fetched if ranks == 1 else matrix
    yield _row("output head being gathered", 0.0 if is_gathered else arriving, Moment.gather, Moment.gather)


def _head_unit_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    """Rows for several ranks that train an untied head, which FSDP gathers after all layers.

    The head is in one unit with the last norm. That unit stays gathered until its backward pass; its gather buffer is
    held until that pass begins. The embeddings are treated like the layers.
    """
    element, parameters = bytes_per_compute_value(config), count_parameters(config, facts)
    keeps_all, layers = strategy_facts(config).keeps_gathered, max(1, facts.num_layers)
    layer, head = element * parameters.layers / layers, float(element * parameters.embeddings)
    forward = layer * (layers + 1) + head if keeps_all else 2 * layer
    yield _row("gathered layers", forward, Moment.forward, Moment.gather)
    kept = head + layer * layers if keeps_all else 0.0
    yield _row("gathered layers and embeddings", kept, Moment.head, Moment.reduce)
    yield _row("gathered output head", head, Moment.head, Moment.reduce)
    yield _row("gather buffer of the output head", head, Moment.head, Moment.head)
    # The head's gradient is copied to fp32 for its reduction and freed: 4 bytes of each number, of which another row,
    # "gradient of the head", counts 2 (torch 2.13, _fsdp_collectives.py, foreach_reduce).
    is_offloaded = offloads_parameters(config) and not keeps_all and layers > 1
    at_last = head if is_offloaded else 2 * head
    yield _row("gradient of the output head in transit, and embeddings", at_last, Moment.last, Moment.last)


def _fsdp_backward_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    """Rows of layers gathered in the backward pass, and of the previous layer's gradients in transit.

    Those gradients are held until this layer's are sent, in the reduction format: 10.1 bytes for each parameter of a
    layer with bf16 products of fp32 weights (tests/parallel/test_fsdp_moments.py).
    """
    layers, element, parameters = facts.num_layers, bytes_per_compute_value(config), count_parameters(config, facts)
    yield _row(
        "gathered layers and one layer's gradient", _gathered_layer_bytes(config, facts), Moment.last, Moment.last
    )
    if _reduces_layers(config, facts):
        layer = parameters.layers / layers
        whole = layers - 1 if strategy_facts(config).keeps_gathered else 1 if layers == 2 else 2
        sent = float(bytes_per_weight(config) * layer)
        yield _row("gradients of the previous layer in transit", sent, Moment.middle, Moment.first)
        yield _row("gathered layers", element * whole * layer, Moment.middle, Moment.middle)
        yield _row("gathered first layer", element * layer, Moment.first, Moment.first)
    if _is_full(config):
        # The gradient in fp32 in transit, and as it was computed (9 layers of Llama 3 8B on two H200).
        embeddings = float((parameters.trained_embeddings + looked_up_parameters(facts)) * (4 + element))
        yield _row("gradient of the embeddings in transit", embeddings, Moment.sent, Moment.sent)


def _prefetched_layer_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of layers gathered while the head is computed: all that stay gathered, or one prefetched layer.

    One rank prefetches nothing (_fsdp_param_group.py), and recomputed layers are not gathered at that moment.
    """
    if strategy_facts(config).keeps_gathered:
        return _gathered_layer_bytes(config, facts)
    return 0.0 if world_size(config) == 1 or is_recomputed(config) else _layer_bytes(config, facts)


def _gathered_layer_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of layers gathered in a backward pass, with one layer's gradient: two layers, or all that were kept.

    One rank holds one layer: it prefetches nothing (torch 2.13, _fsdp_param_group.py, unshard). Frozen weights have no
    gradients.
    """
    if shard_counts(config).weights == 1 and not offloads_parameters(config):
        return 0.0
    layer = _layer_bytes(config, facts)
    if world_size(config) == 1 and not (_is_full(config) and strategy_facts(config).keeps_gathered):
        return layer
    return layer * (facts.num_layers if strategy_facts(config).keeps_gathered else 2)


def _layer_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of one layer as it is gathered; 4-bit weights stay in 4 bits."""
    parameters, element = count_parameters(config, facts), bytes_per_compute_value(config)
    in_four_bits = parameters.linear if config.peft.method is PeftMethod.qlora else 0
    whole = in_four_bits * FOUR_BIT_BYTES + (parameters.layers - in_four_bits) * element
    return whole / max(1, facts.num_layers)


def _is_full(config: RunConfig) -> bool:
    return config.peft.method is PeftMethod.full


def _fetched_bytes_per_weight(config: RunConfig) -> int:
    """Bytes of each number that one rank of FSDP fetches from its host: the stored format, and its cast if needed."""
    kept, whole = bytes_per_weight(config), bytes_per_compute_value(config)
    return kept + (whole if kept != whole else 0)


# DeepSpeed


def _zero_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    """Rows of DeepSpeed; stages 1 and 2 allocate gradient buckets when a backward pass begins (setup_buckets)."""
    settings = config.parallelism
    if not isinstance(settings, ZeroConfig):  # the rule strategy-settings-mismatch refuses it after this estimate
        return
    if strategy_facts(config).is_zero3:
        yield from _zero3_rows(config, facts, settings)
        return
    bucket = float(bytes_per_weight(config) * (settings.reduce_bucket_size or facts.hidden_size**2))
    if settings.offload_optimizer is Offload.none:
        buckets = bucket * (2 if settings.overlap_comm else 1)
        yield _row("gradient buckets", buckets, Moment.reduce, Moment.last)
        yield _row("gradient buckets", buckets, Moment.step, Moment.step)
        return
    forward, backward = _OVERLAPPING_ADAPTERS, _OVERLAPPING_ADAPTERS_BACKWARD
    if _is_full(config):
        forward = backward = _OVERLAPPING
    if not settings.overlap_comm:
        forward = backward = 1.0
    yield _row("gradient buckets", forward * bucket, Moment.start, Moment.reduce)
    yield _row("gradient buckets", backward * bucket, Moment.last, Moment.last)
    yield _row("gradient buckets", forward * bucket, Moment.middle, Moment.end)


def _zero3_rows(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> Iterator[Row]:
    """Rows of parameters that stage 3 keeps gathered, and of the gathered output head and its partitioned gradient.

    Parameters stay gathered if they are used again within as many numbers as stage 3 may keep, a billion by default
    (deepspeed 0.19.8, partitioned_param_coordinator.py, __params_to_release). A single rank fetches what it offloads,
    the embeddings again for the head that arrives, whose gradient is in fp32.
    """
    ranks, parameters, element = world_size(config), count_parameters(config, facts), bytes_per_weight(config)
    is_offloaded, head = offloads_parameters(config), float(element * parameters.embeddings)
    live = settings.max_live_parameters or _LIVE_PARAMETERS
    if is_offloaded and _is_full(config) and not facts.tie_word_embeddings:
        live += parameters.embeddings  # measured: an untied head came on top (4 layers of Qwen2.5-7B)
    kept = element * float(max(min(parameters.layers + parameters.embeddings, live), parameters.embeddings))
    yield _row("reduce bucket", float(element * (settings.reduce_bucket_size or 0)), Moment.start, Moment.end)
    if ranks == 1:
        fetched = element * min(facts.num_parameters, live) + head + 4.0 * parameters.trained_head
        yield _row("parameters from the host", fetched if is_offloaded else 0.0, Moment.forward, Moment.last)
        return
    yield _row("gathered parameters", kept, Moment.forward, Moment.last)
    # The gather buffer, and a copy to the parameter: 5.8 GiB for Qwen3-8B's 2.3 of embeddings on two H200. With
    # adapters no layer is gathered at that moment.
    arriving = (1 + 1 / ranks) * head - (0.0 if _is_full(config) or is_offloaded else kept - head)
    yield _row("output head being gathered", arriving, Moment.gather, Moment.gather)
    if not facts.tie_word_embeddings:  # bf16, and each rank's share in fp32 (2.9 GiB for Qwen2.5-14B's of 2.9)
        is_cast = config.precision.compute is not Compute.fp32
        sent = ((0.5 if is_cast else 0.0) + 1 / ranks) * 4.0 * parameters.trained_head
        yield _row("gradient of the output head in transit", sent, Moment.reduce, Moment.reduce)
