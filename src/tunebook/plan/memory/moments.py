"""The moments of a step in which the memory of a rank may be at its peak, part by part.

    first      FSDP fetches the embeddings from the host
    forward    of the last layer, where it has more at work than it keeps
    head       the output head is computed: all that is kept of the layers is there, and its tiles
    hand on    the head's gradient in fp32 is cast to the format of its weight, or to what FSDP gathers
    gather     ZeRO-3 and FSDP make the output head whole just before
    reduce     ZeRO-2 makes room for a pass's gradients just after
    scatter    ZeRO-3 divides the head's gradient among the ranks just after
    backward   of the last layer, for which FSDP gathers, and which activation checkpointing computes again
    later      of the layer before it, while FSDP still holds what it sends of the last one
    end        the backward pass ends: all gradients are there, and at most one layer's activations
    step       DeepSpeed puts a rank's gradients in one piece, in fp32

Between them the one grows as the other shrinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tunebook.config.choices import Checkpointing
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters
from tunebook.plan.memory.activations import (
    after_head_bytes,
    head_bytes,
    head_gradient_bytes,
    left_head_gradient_bytes,
    one_layer_bytes,
)
from tunebook.plan.memory.buffers import (
    backward_buffer_bytes,
    bucket_bytes,
    buffer_bytes,
    cleared_buffer_bytes,
    first_gathering_bytes,
    forward_buffer_bytes,
    gathering_bytes,
    handing_on_buffer_bytes,
    reducing_bytes,
    reducing_layer_bytes,
    root_gradient_bytes,
    scattering_bytes,
)
from tunebook.plan.memory.states import (
    States,
    earlier_gradient_bytes,
    reduced_gradient_bytes,
    state_bytes,
    stepping_bytes,
)
from tunebook.plan.memory.working import (
    backward_bytes,
    computes_products_again,
    forward_bytes,
    kept_bytes,
    last_offloaded_bytes,
    recomputed_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes of one rank at one time."""

    states: States
    gradients: float
    buffers: float
    activations: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.states.weights + self.states.optimizer + self.gradients + self.buffers + self.activations


def fullest_moment(config: RunConfig, facts: ModelFacts, *, accumulates: bool) -> Moment:
    """The one with the most bytes. `accumulates`: whether earlier passes of the step have left gradients."""
    return max(_moments(config, facts, accumulates=accumulates), key=lambda moment: moment.total)


def _moments(config: RunConfig, facts: ModelFacts, *, accumulates: bool) -> Iterator[Moment]:
    states = state_bytes(config, facts)
    room = _Room.of(config, facts, states, accumulates=accumulates)
    passes = earlier_gradient_bytes(config, states, accumulates=accumulates)
    yield from _forward_moments(config, facts, states, room, passes)
    yield from _backward_moments(config, facts, states, room, passes, accumulates=accumulates)
    if stepping := stepping_bytes(config, facts):
        gradients, reducing = min(states.gradients, stepping), reducing_bytes(config, facts)
        yield Moment(states=states, gradients=gradients, buffers=reducing + stepping - gradients, activations=0.0)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Bytes that ZeRO's first two stages take for a pass's gradients besides those that stay; 0 with others."""

    whole: float  # made when a pass begins to be reduced
    spare: float  # of stage 2's, what is not gradients that stay
    of_earlier: float  # of that, what is there of earlier passes
    is_stage_1: bool

    @classmethod
    def of(cls, config: RunConfig, facts: ModelFacts, states: States, *, accumulates: bool) -> _Room:
        whole, is_stage_1 = reduced_gradient_bytes(config, facts), strategy_facts(config).zero_stage == 1
        spare = whole - states.gradients if whole > 0 and not is_stage_1 else 0.0
        # Stage 2 adds up pieces of the first pass's room, and so keeps all of it (0.19.8, copy_grads_in_partition).
        return cls(whole=whole, spare=spare, of_earlier=spare if accumulates else 0.0, is_stage_1=is_stage_1)


def _is_recomputed(config: RunConfig) -> bool:
    return config.activation.checkpointing is Checkpointing.enabled


def _forward_moments(
    config: RunConfig, facts: ModelFacts, states: States, room: _Room, passes: float
) -> Iterator[Moment]:
    """Up to when the head is whole; `passes`: bytes of the gradients that earlier ones have left."""
    is_recomputed = _is_recomputed(config)
    kept = kept_bytes(config, facts, is_recomputed=is_recomputed)

    def moment(buffers: float, activations: float) -> Moment:
        return Moment(states=states, gradients=passes, buffers=buffers + room.of_earlier, activations=activations)

    if first := first_gathering_bytes(config, facts):
        yield moment(first, 0.0)
    buffers = buffer_bytes(config, facts, is_recomputed=is_recomputed)
    at_work = 0.0 if is_recomputed else forward_bytes(config, facts)
    yield moment(forward_buffer_bytes(config, facts, is_recomputed=is_recomputed), kept + at_work)
    yield moment(buffers, kept + head_bytes(config, facts))
    of_head = left_head_gradient_bytes(config, facts)
    if of_head < head_gradient_bytes(config, facts):
        whole = handing_on_buffer_bytes(config, facts, is_recomputed=is_recomputed)
        yield moment(whole, kept + after_head_bytes(config, facts) + of_head)
    if gathering := gathering_bytes(config, facts):
        yield moment(buffers + gathering, kept + (at_work if config.activation.offload else 0.0))


def _backward_moments(
    config: RunConfig, facts: ModelFacts, states: States, room: _Room, passes: float, *, accumulates: bool
) -> Iterator[Moment]:
    """From when the head is done; `passes`: as before, to which stage 2 adds this one's when it makes room."""
    is_recomputed = _is_recomputed(config)
    kept, reducing = kept_bytes(config, facts, is_recomputed=is_recomputed), reducing_bytes(config, facts)
    after = kept + after_head_bytes(config, facts)
    if room.whole > 0 and not room.is_stage_1:
        passes += states.gradients

    def moment(buffers: float, activations: float, gradients: float = passes) -> Moment:
        whole = buffers + reducing + room.spare + room.of_earlier
        return Moment(states=states, gradients=gradients, buffers=whole, activations=activations)

    buffers = cleared_buffer_bytes(config, facts, is_recomputed=is_recomputed)
    if room.whole > 0 and not room.is_stage_1:
        yield moment(buffers, after)
    if scattering := scattering_bytes(config, facts):
        yield moment(buffers + scattering, after)
    layer = recomputed_bytes(config, facts) if is_recomputed else backward_bytes(config, facts)
    left = _left_for_layers(config, facts, kept, accumulates=accumulates)
    if layer or isinstance(config.parallelism, FsdpConfig):
        yield moment(backward_buffer_bytes(config, facts, is_recomputed=is_recomputed), left + layer)
    if later := reducing_layer_bytes(config, facts):
        of_head = 0.0 if facts.tie_word_embeddings else left_head_gradient_bytes(config, facts)
        done = states.gradients * _share_of_head_and_layer(config, facts)
        yield moment(later, left - kept / facts.num_layers - of_head + layer, max(passes, done))
        of_first = reducing_layer_bytes(config, facts, is_last=True)
        yield moment(of_first, one_layer_bytes(config, facts), max(passes, states.gradients))
    yield moment(
        bucket_bytes(config, facts) + (room.whole if room.is_stage_1 else 0.0),
        _last_layer_bytes(config, facts, states, is_recomputed=is_recomputed),
        max(passes, states.gradients),
    )


def _left_for_layers(config: RunConfig, facts: ModelFacts, kept: float, *, accumulates: bool) -> float:
    """Activations when the layers' backward pass begins: what they kept, and what is left of the head.

    Its gradient is added to that of earlier passes before any layer's is computed, but not where it is the embeddings',
    too, and waits for theirs, nor where it is sent to other ranks. What the last norm kept is gone by then; it is still
    counted where what layers have at work was found with it.
    """
    of_head = left_head_gradient_bytes(config, facts)
    if config.activation.checkpointing is Checkpointing.enabled or computes_products_again(config):
        is_alone = strategy_facts(config).is_copied
        return kept + (0.0 if accumulates and is_alone and not facts.tie_word_embeddings else of_head)
    return kept + after_head_bytes(config, facts) - head_gradient_bytes(config, facts) + of_head


def _share_of_head_and_layer(config: RunConfig, facts: ModelFacts) -> float:
    """Of what is trained, the part whose gradients are there once a layer's are."""
    parameters = count_parameters(config, facts)
    head = 0 if facts.tie_word_embeddings else parameters.trained_head
    return (head + parameters.layers / facts.num_layers) / max(1, parameters.trained)


def _last_layer_bytes(config: RunConfig, facts: ModelFacts, states: States, *, is_recomputed: bool) -> float:
    """What is left to do when the backward pass ends: the first layer, computed again, or the embeddings.

    Embeddings that are the output head too have a gradient already, to which theirs is added whole; others have none
    yet while the first layer is computed.
    """
    layer = one_layer_bytes(config, facts) if is_recomputed else last_offloaded_bytes(config, facts)
    if root := root_gradient_bytes(config, facts):
        return max(layer, root)
    embeddings = count_parameters(config, facts).trained_embeddings * states.gradient_element
    return max(layer, embeddings) if facts.tie_word_embeddings else max(0.0, layer - embeddings)
