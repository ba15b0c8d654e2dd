"""The memory of one rank, from a model's sizes and traced layers alone: no weights, no network, no torch.

    states     weights, gradients and optimizer state, divided among the ranks as the strategy says
    kept       what the forward pass keeps for the backward pass
    work       what one layer needs at work
    sharding   weights that are gathered or cast, and gradients on their way
    ledger     rows of bytes over the moments of a step, the fullest of which is the peak
    rows       the ledger of a run
    overhead   what fills the GPU besides tensors
    gpu, host  the verdicts for a GPU, and for a node's host memory and disk

tests/bench/test_memory_table.py holds it against every peak that torch reported of runs on H100s and H200s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import Checkpointing, PackingMode
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig
from tunebook.plan.memory.ledger import Kind
from tunebook.plan.memory.overhead import overhead_bytes
from tunebook.plan.memory.rows import step_ledger
from tunebook.plan.memory.states import num_ranks

GIB = 2**30
# What tensors may fill of the memory. The rest is the CUDA context, communication buffers and unusable pieces, which
# `overhead` estimates. The fullest runs on H200s held 86% (one GPU), 85% (DDP) and 83% (FSDP) without running out
# (tests/bench/results: h200_memory.jsonl, h200x2_selective.jsonl), and thirty that were to fill one H100 or two to this
# share took 79% to 97% of each GPU with all that comes on top (h100_held_out.jsonl, h100x2_held_out.jsonl), two of them
# only with segments of the allocator that grow (`supervise`). As runs are estimated today, none is more than 5% too
# low.
USABLE_SHARE = 0.83


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
    parts = step_ledger(config, facts, accumulates=accumulates).parts()
    return Estimate(**{f"{kind.value}_gib": parts[kind] / GIB for kind in Kind})


def unknown_size(config: RunConfig) -> str:
    """Why there is no estimate, as the end of a sentence."""
    if config.model.facts is None:
        return "nor is the model's size"
    return "the layers of the stated sizes are traced with torch and transformers, which are not installed here"


def fits_into(config: RunConfig, tensors_gib: float, memory_gib: float) -> bool:
    """Whether a peak of tensors leaves room for what is there besides them, also where nothing has to be given back."""
    besides = overhead_bytes(config, tensors_gib * GIB) / GIB
    return tensors_gib <= memory_gib * USABLE_SHARE and tensors_gib + besides <= memory_gib


def gib_text(value: float) -> str:
    """GiB as reasons name them: to a tenth, and of less than one the first two digits."""
    return f"{value:.1f} GiB" if value >= 1 else f"{value:.2g} GiB"


def _may_accumulate(config: RunConfig) -> bool:
    """Whether a step may take more than one pass by its budget.

    Documents are not counted before they are packed, but as many of the longest as fit into the rows of one pass do so
    however long they are.
    """
    training, is_padded = config.training, config.packing.mode is PackingMode.padded
    rows = num_ranks(config) * max(1, training.micro_batch_size or 1)
    row = config.packing.row_length
    if training.global_samples is not None:
        in_a_row = 1 if is_padded or row is None else row // max(1, training.max_length)
        return training.global_samples > rows * in_a_row
    if training.global_tokens is None or row is None or is_padded:
        return True
    return training.global_tokens > rows * row
