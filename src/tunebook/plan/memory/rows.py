"""The ledger rows common to every strategy: states, gradients and activations."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, looked_up_parameters
from tunebook.plan.memory.activations import activations_of
from tunebook.plan.memory.ledger import Kind, Ledger, Moment, Row
from tunebook.plan.memory.sharding import buffer_rows, reduces_layers
from tunebook.plan.memory.states import (
    States,
    bytes_per_trained_weight,
    reduced_gradient_bytes,
    state_bytes,
    step_gradient_bytes,
)


def step_ledger(config: RunConfig, facts: ModelFacts, *, accumulates: bool) -> Ledger:
    """The memory of a step. `accumulates`: whether gradients of earlier passes of the step exist."""
    states = state_bytes(config, facts)
    rows = [
        Row("weights", Kind.weights, states.weights, Moment.start, Moment.step),
        Row("optimizer state", Kind.optimizer, states.optimizer, Moment.start, Moment.step),
        *_gradient_rows(config, facts, states, accumulates=accumulates),
        *_activation_rows(config, accumulates=accumulates),
        *buffer_rows(config, facts),
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
    if reduces_layers(config, facts):
        share, layer = trained / max(1, parameters.trained), parameters.layers / facts.num_layers
        head = 0 if facts.tie_word_embeddings else parameters.trained_head
        done = share * (head + layer)
        yield Row("gradients of the head and a layer", Kind.gradients, done, Moment.middle, Moment.middle)
        later = share * (parameters.trained_embeddings + layer)  # the first layer's is counted as it is computed
    there = max(0.0, trained - later)
    yield Row("gradients of the layers and the head", Kind.gradients, there, Moment.first, Moment.sent)
    yield Row("gradients that come last", Kind.gradients, trained - there, Moment.end, Moment.sent)
