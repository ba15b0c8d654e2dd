"""Estimate one rank's memory: one fake training step of a few layers, and a ledger of states and buffers. No weights.

    activations  which fake step stands for a run, and what was found of such steps before
    fake_step    runs a few layers on tensors without memory; `tracker` counts what is alive, `compiled` runs compiled
                 layers, `stand_ins` does what a CPU lacks, `tower` what images need
    states       weights, gradients and optimizer state, divided among the ranks by the strategy
    ledger       rows of bytes over the moments of a step; the peak is the fullest moment
    rows         the ledger of a run, with gathered weights and gradients in transit
    host         a node's host memory
    verdict      whether both fit, with the overhead, margins, and measured steps

tests/plan/memory/test_recorded_runs.py compares it with every peak that torch reported for runs on H100s and H200s.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import PackingMode
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig, data_ranks
from tunebook.data.batch import longest_document
from tunebook.plan.memory.ledger import Kind
from tunebook.plan.memory.rows import step_ledger

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """GiB of one rank at its estimated peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # including the output head's
    buffers: float

    @property
    def states_gib(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total_gib(self) -> float:
        """All tensors: the peak of allocated memory that torch reports."""
        return self.states_gib + self.buffers + self.activations


def estimate_memory(config: RunConfig, facts: ModelFacts, *, accumulates: bool | None = None) -> Estimate:
    """Estimate one rank's memory for a resolved machine, precision, packing and micro batch.

    `accumulates`: whether an optimizer step takes more than one pass. None means that nobody has counted the passes:
    the estimate then assumes accumulation, unless one pass holds all tokens of a step.
    """
    if accumulates is None:
        accumulates = _may_accumulate(config)
    parts = step_ledger(config, facts, accumulates=accumulates).parts()
    return Estimate(**{kind.value: parts[kind] / GIB for kind in Kind})


def _may_accumulate(config: RunConfig) -> bool:
    """Whether a step may take more than one pass, judged by its budget.

    The number of packed documents is unknown before packing. Each row of a pass holds at least as many documents as fit
    at the longest length.
    """
    training, is_padded = config.training, config.packing.mode is PackingMode.padded
    rows = data_ranks(config) * max(1, training.micro_batch_size or 1)
    row = config.packing.row_length
    if training.global_samples is not None:
        in_a_row = 1 if is_padded or row is None else row // max(1, longest_document(config))
        return training.global_samples > rows * in_a_row
    if training.global_tokens is None or row is None or is_padded:
        return True
    return training.global_tokens > rows * row
