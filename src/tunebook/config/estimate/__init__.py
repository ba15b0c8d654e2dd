"""The memory of one rank from a model's sizes alone: no weights, no network, no torch.

    parameters    how many there are, and how many are trained
    states        weights, gradients and optimizer state, divided among the ranks as the strategy says
    buffers       what is whole, or in another number format, for a time
    activations   what the forward pass keeps for the backward pass
    overhead      what fills the device besides tensors
    host          the memory of a node's host, and its NVMe disk

The parts are those of the moment at which the backward pass begins, with gradients of an earlier pass still there: the
peak of every run but those with next to no tokens, for which the end of the backward pass is looked at besides.
`auto` decides by it, and the plan shows it part by part; it is called *estimated* wherever it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import Switch
from tunebook.config.estimate.activations import activation_bytes, head_bytes
from tunebook.config.estimate.buffers import buffer_bytes
from tunebook.config.estimate.parameters import count_parameters
from tunebook.config.estimate.states import state_bytes
from tunebook.config.schema import ModelFacts, RunConfig

GIB = 2**30
# What tensors may fill of the memory. The rest is the CUDA context, communication buffers and unusable pieces, which
# `overhead` estimates from others' figures. They come to less than a fifth of most GPUs, but as long as no run of ours
# has recorded them (`memory_reserved_gib`, `memory_device_gib`), nothing larger is taken for fitting because of them.
USABLE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory of one rank in GiB at its peak."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    buffers_gib: float
    activations_gib: float  # with the output head's

    @property
    def states_gib(self) -> float:
        """What there is of the model whatever is computed: weights, gradients and optimizer state."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def total_gib(self) -> float:
        """All tensors: what torch reports as the peak of allocated memory."""
        return self.states_gib + self.buffers_gib + self.activations_gib


def estimate_memory(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool | None = None) -> Estimate:
    """Estimate one rank's memory for a resolved machine, precision, packing and micro batch.

    `is_recomputed`: with activation checkpointing or without, in place of what the configuration says.
    """
    if is_recomputed is None:
        is_recomputed = config.activation.checkpointing is Switch.enabled
    states = state_bytes(config, facts)
    kept = activation_bytes(config, facts, is_recomputed=is_recomputed) + head_bytes(config, facts)
    # At the end of the backward pass no activation is left, but the embeddings' gradient is there a second time.
    embeddings = count_parameters(config, facts).trained_embeddings * states.gradient_element
    return Estimate(
        weights_gib=states.weights / GIB,
        gradients_gib=states.gradients / GIB,
        optimizer_gib=states.optimizer / GIB,
        buffers_gib=buffer_bytes(config, facts, is_recomputed=is_recomputed) / GIB,
        activations_gib=max(kept, embeddings) / GIB,
    )
