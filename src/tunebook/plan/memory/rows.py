"""The ledger rows common to every strategy: states, gradients, activations and the output head."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, looked_up_parameters
from tunebook.plan.memory.kept import kept_by_one_layer, tokens_per_pass
from tunebook.plan.memory.ledger import Kind, Ledger, Moment, Row
from tunebook.plan.memory.sharding import buffer_rows, reduces_layers
from tunebook.plan.memory.states import (
    States,
    bytes_of_embedded_value,
    bytes_per_compute_value,
    bytes_per_hidden_value,
    bytes_per_trained_weight,
    offloads_parameters,
    reduced_gradient_bytes,
    state_bytes,
    step_gradient_bytes,
)
from tunebook.plan.memory.work import (
    backward_work,
    forward_work,
    is_recomputed,
    kept_in_backward,
    kept_on_device,
    recomputes_compiled_mlp,
)

# The output head is computed in tiles of this many tokens and words (trl 1.16, kernels/chunked_logprob.py).
# `model.one_pass_head`, which computes gradients in the forward pass, uses tiles of as many tokens and all words.
_HEAD_TOKENS, _HEAD_VOCABULARY = 4096, 32768


def step_ledger(config: RunConfig, facts: ModelFacts, *, accumulates: bool) -> Ledger:
    """The memory of a step. `accumulates`: whether gradients of earlier passes of the step exist."""
    states = state_bytes(config, facts)
    rows = [
        Row("weights", Kind.weights, states.weights, Moment.start, Moment.step),
        Row("optimizer state", Kind.optimizer, states.optimizer, Moment.start, Moment.step),
        *_gradient_rows(config, facts, states, accumulates=accumulates),
        *_layer_rows(config, facts),
        *_head_rows(config, facts, accumulates=accumulates),
        *buffer_rows(config, facts),
    ]
    return Ledger([row for row in rows if row.num_bytes > 0])


def _gradient_rows(config: RunConfig, facts: ModelFacts, states: States, *, accumulates: bool) -> Iterator[Row]:
    """Rows of gradients of earlier passes and of this pass, and of DeepSpeed's additional gradient buffers.

    ZeRO-3 allocates one buffer for all gradients at the start. ZeRO-2 allocates a buffer for a pass's gradients before
    it adds them up, and keeps the first pass's buffer. ZeRO-1 allocates it at the end of the last pass.
    """
    strategy, whole = strategy_facts(config), reduced_gradient_bytes(config, facts)
    earlier = states.gradients if accumulates or strategy.is_zero3 else 0.0
    yield Row("gradients of earlier passes", Kind.gradients, earlier, Moment.start, Moment.end)
    if strategy.zero_stage == 2 and whole:
        spare = whole - states.gradients
        yield Row("gradient buffer of the pass", Kind.gradients, states.gradients, Moment.reduce, Moment.end)
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
        yield Row("gradient buffer of the rank", Kind.buffers, whole, Moment.end, Moment.end)
    if config.peft.method is PeftMethod.full and not strategy.is_fsdp and (accumulates or not strategy.is_copied):
        looked_up = float(looked_up_parameters(facts) * bytes_per_trained_weight(config))  # before it is added or sent
        yield Row("gradient of other embeddings", Kind.activations, looked_up, Moment.end, Moment.end)
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
    if reduces_layers(config, facts):
        share, layer = trained / max(1, parameters.trained), parameters.layers / facts.num_layers
        head = 0 if facts.tie_word_embeddings else parameters.trained_head
        done = share * (head + layer)
        yield Row("gradients of the head and a layer", Kind.gradients, done, Moment.middle, Moment.middle)
        later = share * (parameters.trained_embeddings + layer)  # the first layer's is counted as it is computed
    there = max(0.0, trained - later)
    yield Row("gradients of the layers and the head", Kind.gradients, there, Moment.first, Moment.end)
    yield Row("gradients that come last", Kind.gradients, trained - there, Moment.end, Moment.end)


def _layer_rows(config: RunConfig, facts: ModelFacts) -> Iterator[Row]:
    """Rows of activations that the layers keep for the backward pass, and of one layer's working memory."""
    kept, layers = kept_on_device(config, facts), max(1, facts.num_layers)
    at_work = forward_work(config, facts)
    until = Moment.gather if config.activation.offload else Moment.forward
    if is_recomputed(config) and config.activation.offload:
        left = kept_in_backward(config, facts)
        yield Row("inputs of layers on the GPU", Kind.activations, kept, Moment.forward, Moment.reduce)
        yield Row("inputs of layers on the GPU", Kind.activations, left, Moment.last, Moment.middle)
    else:
        yield Row("kept by the last layer", Kind.activations, kept / layers, Moment.forward, Moment.last)
        yield Row("kept by the other layers", Kind.activations, kept - kept / layers, Moment.forward, Moment.middle)
    yield Row("working memory of the last layer's forward pass", Kind.activations, at_work, Moment.forward, until)
    at_work = backward_work(config, facts)
    yield Row("working memory of a layer's backward pass", Kind.activations, at_work, Moment.last, Moment.middle)
    if is_recomputed(config) or reduces_layers(config, facts):
        # A recomputed first layer is at work when all other layers' gradients exist.
        of_first = at_work if is_recomputed(config) else kept_by_one_layer(config, facts)
        yield Row("kept by the first layer, at work", Kind.activations, of_first, Moment.first, Moment.first)
    if is_recomputed(config):
        embedded = float(tokens_per_pass(config) * facts.hidden_size * bytes_of_embedded_value(config))
        yield Row("input of the first layer", Kind.activations, embedded, Moment.first, Moment.first)


def _head_rows(config: RunConfig, facts: ModelFacts, *, accumulates: bool) -> Iterator[Row]:
    """Rows of the last norm, the tiles of the output head and its gradient.

    The gradient is held until the backward pass of its weight. It is added to that of earlier passes before any
    layer's, unless the weight is tied to the embeddings or the gradient is sent to other ranks.
    """
    tokens, element = tokens_per_pass(config), bytes_per_compute_value(config)
    words = facts.vocab_size if config.model.one_pass_head else min(facts.vocab_size, _HEAD_VOCABULARY)
    tile = min(tokens, _HEAD_TOKENS) * words * element
    weight = words * facts.hidden_size * element if _casts_head(config) else 0
    yield Row("a tile of logits", Kind.activations, tile, Moment.head, Moment.head)
    yield Row("cast weight of the head", Kind.activations, weight, Moment.head, Moment.head)
    computes_again = is_recomputed(config) or recomputes_compiled_mlp(config)
    norm, until = 16.0 * tokens * facts.hidden_size, Moment.reduce if computes_again else Moment.middle
    yield Row("last norm", Kind.activations, norm, Moment.head, until)
    gradient, handed_on = head_gradient_bytes(config, facts), _cast_head_gradient_bytes(config, facts)
    yield Row("gradient of the head in fp32", Kind.activations, gradient, Moment.head, Moment.reduce)
    if handed_on < gradient:
        yield Row("gradient of the head in the weight's format", Kind.activations, handed_on, Moment.cast, Moment.cast)
    is_added = accumulates and computes_again and strategy_facts(config).is_copied and not facts.tie_word_embeddings
    if not is_added:
        until = Moment.last
        if facts.tie_word_embeddings:  # FSDP keeps it until it has the embeddings' gradient
            until = Moment.first if reduces_layers(config, facts) else Moment.middle
        yield Row("gradient of the head", Kind.activations, handed_on, Moment.last, until)
    if facts.tie_word_embeddings and not isinstance(config.parallelism, FsdpConfig):
        added = count_parameters(config, facts).trained_embeddings * bytes_per_trained_weight(config)
        yield Row("gradient of the embeddings", Kind.activations, added, Moment.end, Moment.end)


def _casts_head(config: RunConfig) -> bool:
    """Whether the head's weight is cast for its product. TRL's head always copies a part of it."""
    is_cast = bytes_per_hidden_value(config) != bytes_per_compute_value(config) or not config.model.one_pass_head
    if config.model.one_pass_head and isinstance(config.parallelism, FsdpConfig):
        is_adapter = config.peft.method is not PeftMethod.full
        return is_cast and is_adapter and not offloads_parameters(config)  # else it is gathered in bf16
    return is_cast


def head_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the output head's fp32 gradient at the start of the backward pass; 0 if the head is frozen."""
    return 4.0 * count_parameters(config, facts).trained_head


def _cast_head_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of that gradient in the format of the weight, or with FSDP in the gathered format."""
    element = bytes_per_trained_weight(config)
    if isinstance(config.parallelism, FsdpConfig):
        element = min(element, bytes_per_compute_value(config))
    return head_gradient_bytes(config, facts) * element / 4
