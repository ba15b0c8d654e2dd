"""Solve the batch: from documents per optimizer step to rows, micro-batches, accumulation and steps.

A batch is counted in documents (`training.global_samples`) or tokens (`training.global_tokens`), never in rows, so that
packing, the number of GPUs and their memory do not change the documents of an optimizer step. Before the data is
prepared, lengths are estimated from the data set's facts, and the plan says so; afterwards they are exact.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tunebook.config.choices import PackingMode
from tunebook.config.schema import RunConfig, data_ranks, world_size
from tunebook.data.mean_length import count_documents, longest_document, mean_tokens
from tunebook.data.packing import Lengths, longest_row, rows_needed
from tunebook.data.sampler import Schedule, StepSize, cut_into_steps, epoch_order
from tunebook.errors import RequestError
from tunebook.model.flops import attended_length_tokens

# Default for padded rows per pass: as many as stay within this many tokens at full length.
PADDED_TOKENS_PER_PASS = 8192


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch arithmetic of a run. `rows_per_step` = data_ranks x accumulation x micro_batch_size.

    Numbers that depend on the data are None while it is unknown.
    """

    global_samples: int | None
    global_tokens: int | None
    world_size: int
    micro_batch_size: int  # rows per pass of a GPU, or of a sequence group
    accumulation: int | None  # passes per optimizer step
    rows_per_step: int | None
    row_length: int  # tokens a row holds at most
    is_packed: bool
    is_estimate: bool  # lengths are a mean from the data set's facts, not measured
    documents_per_step: float | None  # mean; the last step of an epoch may be smaller
    tokens_per_step: float | None  # mean, real tokens
    num_documents: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    attended_length: float | None = None  # mean over tokens, see `flops.attended_length_tokens`
    padding_share: float | None = None  # share of the computed tokens, 0 to 1; needs the documents' lengths
    longest_row: int | None = None  # tokens that no row of any step exceeds; needs the documents' lengths
    sequence_group_size: int = 1  # GPUs that share a row

    @property
    def data_ranks(self) -> int:
        """Ranks that get different rows: a sequence group counts as one."""
        return self.world_size // self.sequence_group_size

    def to_json(self) -> dict[str, Any]:
        """The `batch` part of plan.json."""
        values = asdict(self)
        values["micro"] = values.pop("micro_batch_size")
        return values


def solve_batch(config: RunConfig, lengths: Lengths | None) -> BatchPlan:
    """The batch of a resolved configuration that no rule refuses, exact when the documents' `lengths` are given.

    Shapes: `lengths` (num_documents,). Raises: RequestError for fewer documents than a step has.
    """
    samples = config.training.global_samples
    if lengths is not None and samples is not None and len(lengths) < samples:
        there = f"{len(lengths)} documents there are" if len(lengths) != 1 else "1 document there is"
        raise RequestError(
            f"training.global_samples={samples} is more than the {there}; take a smaller number, or fewer GPUs "
            "(hardware.gpus_per_node) if there are more GPUs than documents",
            problem_id="batch-larger-than-data",
        )
    if config.packing.mode is PackingMode.isolated:
        return _packed(config, lengths)
    return _padded(config, lengths)


def schedule_of(config: RunConfig, plan: BatchPlan, lengths: Lengths) -> Schedule:
    """The schedule of every rank's sampler: the plan over the prepared data."""
    assert plan.rows_per_step is not None
    return Schedule(
        lengths=lengths,
        size=_step_size(config),
        rows_per_step=plan.rows_per_step,
        is_packed=plan.is_packed,
        seed=config.training.seed,
        balances_attention=config.packing.balance_attention,
    )


def largest_micro_batch(samples_per_rank: int, max_length: int) -> int:
    """Padded rows of a pass: the largest divisor of a rank's documents that stays within the token limit."""
    most = max(1, PADDED_TOKENS_PER_PASS // max(1, max_length))
    return max(size for size in range(1, min(most, samples_per_rank) + 1) if samples_per_rank % size == 0)


def row_length(config: RunConfig) -> int:
    """Tokens a row holds: packed rows may be longer than one document."""
    if config.packing.mode is PackingMode.isolated:
        return config.packing.row_length or config.training.max_length
    return longest_document(config)


def _step_size(config: RunConfig) -> StepSize:
    training = config.training
    if training.global_samples is not None:
        return StepSize(documents=training.global_samples)
    return StepSize(tokens=training.global_tokens, row_length=row_length(config))


def _packed(config: RunConfig, lengths: Lengths | None) -> BatchPlan:
    training = config.training
    ranks, micro, length = data_ranks(config), training.micro_batch_size or 1, row_length(config)
    if training.global_tokens is not None:
        rows = training.global_tokens // length
        if lengths is None:
            return _plan(config, micro=micro, rows=rows, documents=_mean_documents(config, rows * length), lengths=None)
        steps = cut_into_steps(epoch_order(len(lengths), training.seed, 0), lengths, _step_size(config))
        documents = len(lengths) / len(steps)
        plan = _plan(config, micro=micro, rows=rows, documents=documents, lengths=lengths, num_steps=len(steps))
        return replace(plan, longest_row=length)  # rows are filled almost completely
    samples = training.global_samples
    assert samples is not None
    if lengths is None:
        estimated = _estimated_rows(config, samples, ranks * micro, length)
        return _plan(config, micro=micro, rows=estimated, documents=float(samples), lengths=None)
    size = _step_size(config)
    orders = (epoch_order(len(lengths), training.seed, epoch) for epoch in range(_epochs_to_look_at(config, lengths)))
    steps = [lengths[step] for order in orders for step in cut_into_steps(order, lengths, size)]
    rows = rows_needed(steps, length, ranks * micro)
    rows = min(rows, math.ceil(samples / (ranks * micro)) * ranks * micro)
    per_epoch = math.ceil(len(lengths) / samples)
    plan = _plan(config, micro=micro, rows=rows, documents=float(samples), lengths=lengths, num_steps=per_epoch)
    return replace(plan, longest_row=max(longest_row(step, rows) for step in steps[: plan.total_steps]))


def _epochs_to_look_at(config: RunConfig, lengths: Lengths) -> int:
    """The number of epochs to check, which is all of the run's, so that no step is wider than planned."""
    samples = config.training.global_samples or 1
    if config.training.max_steps is not None:
        return max(1, math.ceil(config.training.max_steps / math.ceil(len(lengths) / samples)))
    return max(1, math.ceil(config.training.num_epochs))


def _padded(config: RunConfig, lengths: Lengths | None) -> BatchPlan:
    training, samples = config.training, config.training.global_samples
    assert samples is not None
    plan = _plan(
        config,
        micro=training.micro_batch_size or largest_micro_batch(samples // data_ranks(config), training.max_length),
        rows=samples,
        documents=float(samples),
        lengths=lengths,
        num_steps=math.ceil(len(lengths) / samples) if lengths is not None else None,
    )
    return plan if lengths is None else replace(plan, longest_row=int(lengths.max(initial=0)))


def _estimated_rows(config: RunConfig, samples: int, unit: int, length: int) -> int | None:
    """Rows for a step of average documents; the exact number is known once the data is prepared.

    One pass (`unit`) if even the longest documents fit into it.
    """
    if samples <= unit * (length // max(1, longest_document(config))):
        return unit
    mean = mean_tokens(config)
    if mean is None:
        return None
    tokens = samples * min(mean, length)
    return max(1, math.ceil(tokens / length / unit)) * unit


def _mean_documents(config: RunConfig, tokens: float) -> float | None:
    mean = mean_tokens(config)
    return tokens / mean if mean else None


def _padding_share(config: RunConfig, lengths: Lengths, micro: int) -> float:
    """The share of padding in one epoch if each pass is as wide as its longest document; 0 for packed rows."""
    if config.packing.mode is PackingMode.isolated or not len(lengths):
        return 0.0
    order = lengths[epoch_order(len(lengths), config.training.seed, 0)]
    width = np.maximum.reduceat(order, np.arange(0, len(order), micro)).sum() * micro
    return 1.0 - float(order.sum() / width)


def _plan(
    config: RunConfig,
    *,
    micro: int,
    rows: int | None,
    documents: float | None,
    lengths: Lengths | None,
    num_steps: int | None = None,
) -> BatchPlan:
    training = config.training
    ranks = data_ranks(config)
    num_documents = len(lengths) if lengths is not None else count_documents(config)
    mean = float(np.mean(lengths)) if lengths is not None else mean_tokens(config)
    if num_steps is None and num_documents is not None and documents:
        num_steps = math.ceil(num_documents / documents)
    total = training.max_steps
    if total is None and num_steps is not None:
        total = max(1, math.ceil(num_steps * training.num_epochs))
    return BatchPlan(
        global_samples=training.global_samples,
        global_tokens=training.global_tokens,
        world_size=world_size(config),
        sequence_group_size=config.parallelism.sequence_group_size,
        micro_batch_size=micro,
        accumulation=rows // (ranks * micro) if rows is not None else None,
        rows_per_step=rows,
        row_length=row_length(config),
        is_packed=config.packing.mode is PackingMode.isolated,
        is_estimate=lengths is None,
        documents_per_step=documents,
        tokens_per_step=documents * mean if documents and mean else None,
        num_documents=num_documents,
        steps_per_epoch=num_steps,
        total_steps=total,
        attended_length=attended_length_tokens(lengths.tolist()) if lengths is not None else None,
        padding_share=_padding_share(config, lengths, micro) if lengths is not None else None,
    )
