"""The memory of one rank from a model's sizes alone: no weights, no network, no torch.

    parameters    how many there are, and how many are trained
    states        weights, gradients and optimizer state, divided among the ranks as the strategy says
    buffers       what is whole, or in another number format, for a time
    activations   what the forward pass keeps for the backward pass
    overhead      what fills the device besides tensors
    host          the memory of a node's host, and its NVMe disk

The parts are those of the fullest of two moments: the backward pass begins (all activations, and gradients only of
earlier passes), or it ends (all gradients, and at most one layer's activations). Between them the one grows as the
other shrinks. Held against the peaks that torch reported of runs on H200s: tests/bench/results/h200_memory.jsonl.
`auto` decides by it, and the plan shows it part by part; it is called *estimated* wherever it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import Checkpointing, PackingMode
from tunebook.config.estimate.activations import activation_bytes, head_bytes, one_layer_bytes
from tunebook.config.estimate.buffers import bucket_bytes, buffer_bytes
from tunebook.config.estimate.overhead import overhead_bytes
from tunebook.config.estimate.parameters import count_parameters
from tunebook.config.estimate.states import States, earlier_gradient_bytes, num_ranks, state_bytes
from tunebook.config.schema import ModelFacts, RunConfig

GIB = 2**30
# What tensors may fill of the memory. The rest is the CUDA context, communication buffers and unusable pieces, which
# `overhead` estimates. The fullest runs on H200s held 86% (one GPU), 85% (DDP) and 83% (FSDP) without running out
# (tests/bench/results: h200_memory.jsonl, h200x2_selective.jsonl), and no estimate was more than 5% too low.
USABLE_SHARE = 0.82


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


def estimate_memory(
    config: RunConfig, facts: ModelFacts, *, checkpointing: Checkpointing | None = None, accumulates: bool | None = None
) -> Estimate:
    """Estimate one rank's memory for a resolved machine, precision, packing and micro batch.

    `checkpointing`: in place of what the configuration says. `accumulates`: whether an optimizer step takes more than
    one pass; None where nobody has counted yet: then it may, unless one pass is all of a step's tokens.
    """
    if checkpointing is not None:
        config = replace(config, activation=replace(config.activation, checkpointing=checkpointing))
    if accumulates is None:
        accumulates = _may_accumulate(config)
    is_recomputed = config.activation.checkpointing is Checkpointing.enabled
    states = state_bytes(config, facts)
    begins = Estimate(
        weights_gib=states.weights / GIB,
        gradients_gib=earlier_gradient_bytes(config, states, accumulates=accumulates) / GIB,
        optimizer_gib=states.optimizer / GIB,
        buffers_gib=buffer_bytes(config, facts, is_recomputed=is_recomputed) / GIB,
        activations_gib=(activation_bytes(config, facts, is_recomputed=is_recomputed) + head_bytes(config, facts))
        / GIB,
    )
    ends = replace(
        begins,
        gradients_gib=max(begins.gradients_gib, states.gradients / GIB),
        buffers_gib=bucket_bytes(config, facts) / GIB,
        activations_gib=_last_layer_bytes(config, facts, states, is_recomputed=is_recomputed) / GIB,
    )
    return max(begins, ends, key=lambda moment: moment.total_gib)


def fits_into(config: RunConfig, tensors_gib: float, memory_gib: float) -> bool:
    """Whether a peak of tensors leaves room on a GPU for what is there besides them."""
    besides = overhead_bytes(config, tensors_gib * GIB) / GIB
    return tensors_gib <= memory_gib * USABLE_SHARE and tensors_gib + besides <= memory_gib


def gib_text(value: float) -> str:
    """GiB as reasons name them: to a tenth, and of less than one the first two digits."""
    return f"{value:.1f} GiB" if value >= 1 else f"{value:.2g} GiB"


def _may_accumulate(config: RunConfig) -> bool:
    """Whether a step may take more than one pass by its budget; documents are not counted before they are packed."""
    budget, row = config.training.global_tokens, config.packing.row_length
    if budget is None or row is None or config.packing.mode is PackingMode.padded:
        return True
    return budget > num_ranks(config) * row * max(1, config.training.micro_batch_size or 1)


def _last_layer_bytes(config: RunConfig, facts: ModelFacts, states: States, *, is_recomputed: bool) -> float:
    """What is left to do when the backward pass ends: the first layer, computed again, or the embeddings.

    Embeddings that are the output head too have a gradient already, to which theirs is added whole; others have none
    yet while the first layer is computed.
    """
    layer = one_layer_bytes(config, facts) if is_recomputed else 0.0
    embeddings = count_parameters(config, facts).trained_embeddings * states.gradient_element
    return max(layer, embeddings) if facts.tie_word_embeddings else max(0.0, layer - embeddings)
