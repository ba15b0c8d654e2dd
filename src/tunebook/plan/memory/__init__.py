"""Estimate one rank's memory: one fake training step of a few layers, and a ledger of states and buffers. No weights.

    activations  which fake step stands for a run, and what was found of such steps before
    fake_step    runs a few layers on tensors without memory and counts what is alive; `stand_ins` for GPU kernels
    states       weights, gradients and optimizer state, divided among the ranks by the strategy
    sharding     gathered weights, and gradients in transit
    ledger       rows of bytes over the moments of a step; the peak is the fullest moment
    rows         the ledger of a run
    overhead     GPU memory that is not tensors
    gpu, host    the verdicts for a GPU, and for a node's host memory and disk

tests/plan/memory/test_recorded_runs.py compares it with every peak that torch reported for runs on H100s and H200s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import Checkpointing, PackingMode
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig, data_ranks
from tunebook.data.mean_length import longest_document
from tunebook.facts.sharing import is_offloaded
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import known_facts
from tunebook.plan.memory.activations import is_recomputed
from tunebook.plan.memory.ledger import Kind
from tunebook.plan.memory.overhead import overhead_bytes
from tunebook.plan.memory.rows import step_ledger

GIB = 2**30
# By kind of run. The wide margin is for what is not run: the order in which DeepSpeed's stage 3 gathers and the engines
# copy from and to the host, and inductor's schedule of a recomputed layer.
MARGIN, WIDE_MARGIN = 0.04, 0.10
# Share of GPU memory that tensors may fill, with a margin of 4%. The rest is the context, communication buffers and
# fragmentation, which `overhead` estimates. The fullest runs on H200s held 86% (one GPU), 85% (DDP) and 83% (FSDP)
# without running out of memory (benchmarks/results: h200_memory.jsonl, h200x2_selective.jsonl). Thirty runs that were
# sized to fill one or two H100s to this share took 79% to 97% of each GPU with the overhead (h100_held_out.jsonl,
# h100x2_held_out.jsonl). Two of them needed the allocator's expandable segments (`launch.supervise`).
USABLE_SHARE = 0.83


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory of one rank in GiB at its peak."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    buffers_gib: float
    activations_gib: float  # including the output head's

    @property
    def states_gib(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def total_gib(self) -> float:
        """All tensors: the peak of allocated memory that torch reports."""
        return self.states_gib + self.buffers_gib + self.activations_gib


def estimate_memory(
    config: RunConfig, facts: ModelFacts, *, checkpointing: Checkpointing | None = None, accumulates: bool | None = None
) -> Estimate:
    """Estimate one rank's memory for a resolved machine, precision, packing and micro batch.

    `checkpointing`: overrides the configured value. `accumulates`: whether an optimizer step takes more than one pass.
    None means that nobody has counted the passes: the estimate then assumes accumulation, unless one pass holds all
    tokens of a step.
    """
    if checkpointing is not None:
        config = replace(config, activation=replace(config.activation, checkpointing=checkpointing))
    if accumulates is None:
        accumulates = _may_accumulate(config)
    parts = step_ledger(config, facts, accumulates=accumulates).parts()
    return Estimate(**{f"{kind.value}_gib": parts[kind] / GIB for kind in Kind})


def unknown_size(config: RunConfig) -> str:
    """Return why there is no estimate, as the end of a sentence."""
    if config.model.facts is None:
        return "nor is the model's size"
    return "its layers are run with torch and transformers, which are not installed here"


def margin_of(config: RunConfig) -> float:
    """Share by which a run may take more than its estimate. Recorded runs that take more are named in the test."""
    is_compiled_again = bool(config.model.compile_layers) and is_recomputed(config)
    is_wide = is_offloaded(config) or is_compiled_again or strategy_facts(config).is_zero3
    return WIDE_MARGIN if is_wide else MARGIN


def fits_into(config: RunConfig, tensors_gib: float, memory_gib: float) -> bool:
    """Whether a peak of tensors plus the overhead fits into the memory, with the reserve of `USABLE_SHARE`."""
    besides = overhead_bytes(config, tensors_gib * GIB) / GIB
    at_most = tensors_gib * (1 + margin_of(config)) / (1 + MARGIN)
    return at_most <= memory_gib * USABLE_SHARE and at_most + besides <= memory_gib


def tensors_fit(config: RunConfig, *, checkpointing: Checkpointing | None = None) -> bool | None:
    """Whether the estimated tensors fit into a GPU; None if its memory or the model's size is unknown."""
    facts, memory = known_facts(config), config.hardware.memory_gib
    if facts is None or memory is None:
        return None
    return fits_into(config, estimate_memory(config, facts, checkpointing=checkpointing).total_gib, memory)


def gib_text(value: float) -> str:
    """Format GiB for messages: one decimal, or two significant digits below 1 GiB."""
    return f"{value:.1f} GiB" if value >= 1 else f"{value:.2g} GiB"


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
