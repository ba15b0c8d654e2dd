"""Solve the batch: from documents per optimizer step to rows, micro-batches, accumulation and steps.

A batch is counted in documents (`training.global_samples`) or tokens (`training.global_tokens`), never in rows, so that
packing, the number of GPUs and their memory do not change the documents of an optimizer step. Before the data is
prepared, lengths are estimated from the data set's facts (`dataset.num_documents`, `mean_tokens`), as the plan says;
afterwards they are exact. The lengths of generated documents are drawn as `data.synthetic` draws them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tunebook.config.choices import PackingMode, Source
from tunebook.config.schema import RunConfig, SyntheticConfig, data_ranks, world_size
from tunebook.data.packing import Lengths, longest_row, rows_needed
from tunebook.data.sampler import Schedule, StepSize, cut_into_steps, epoch_order
from tunebook.data.synthetic import draw_lengths
from tunebook.errors import RequestError
from tunebook.facts.methods import method_facts
from tunebook.model.flops import attended_length_tokens

# Default for padded rows per pass: as many as stay within this many tokens at full length.
PADDED_TOKENS_PER_PASS = 8192
_MOST_DRAWN = 100_000  # lengths of generated documents, in about 20 ms


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
    unit: str = "document"  # what one of its documents is called
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
        del values["unit"]
        return values


def solve_batch(config: RunConfig, lengths: Lengths | None, widths: Lengths | None = None) -> BatchPlan:
    """The batch of a resolved configuration that no rule refuses, exact when the documents' `lengths` are given.

    Shapes: `lengths` and `widths` (num_documents,), the latter of padded rows; None: they are the lengths. Raises:
    RequestError for fewer documents than a step has.
    """
    training, samples, ranks = config.training, config.training.global_samples, data_ranks(config)
    if lengths is not None and samples is not None and len(lengths) < samples:
        raise RequestError(
            f"training.global_samples={samples} is more than the {len(lengths):,} {method_facts(config).reads} there "
            f"are; type training.global_samples={len(lengths)}, or with more GPUs than that fewer GPUs "
            "(hardware.gpus_per_node)",
            problem_id="batch-larger-than-data",
        )
    is_packed = config.packing.mode is PackingMode.isolated
    micro = training.micro_batch_size or 1
    if training.micro_batch_size is None and not is_packed:
        assert samples is not None
        micro = largest_micro_batch(samples // ranks, shortest_row(config))
    num_documents = len(lengths) if lengths is not None else count_documents(config)
    mean = float(np.mean(lengths)) if lengths is not None else mean_tokens(config)
    num_steps: int | None = None
    if samples is not None:
        documents: float | None = float(samples)
    elif lengths is not None:
        num_steps = len(cut_into_steps(epoch_order(len(lengths), training.seed, 0), lengths, _step_size(config)))
        documents = len(lengths) / num_steps
    else:
        tokens = (training.global_tokens or 0) // row_length(config) * row_length(config)
        documents = tokens / mean if mean else None
    if num_steps is None and num_documents is not None and documents:
        num_steps = math.ceil(num_documents / documents)
    total = training.max_steps
    if total is None and num_steps is not None:
        total = max(1, math.ceil(num_steps * training.num_epochs))
    widths, in_rows = lengths if widths is None else widths, method_facts(config).rows_per_document
    rows, longest = _rows_per_step(config, lengths, widths, ranks * micro, num_steps, total)
    return BatchPlan(
        unit=method_facts(config).unit,
        global_samples=samples,
        global_tokens=training.global_tokens,
        world_size=world_size(config),
        sequence_group_size=config.parallelism.sequence_group_size,
        micro_batch_size=micro,
        accumulation=rows // (ranks * micro) if rows is not None else None,
        rows_per_step=rows,
        row_length=row_length(config),
        is_packed=is_packed,
        is_estimate=lengths is None,
        documents_per_step=documents,
        tokens_per_step=documents * mean if documents and mean else None,
        num_documents=num_documents,
        steps_per_epoch=num_steps,
        total_steps=total,
        attended_length=attended_length_tokens((widths // in_rows).tolist()) if widths is not None else None,
        padding_share=_padding_share(config, lengths, widths, micro)
        if lengths is not None and widths is not None
        else None,
        longest_row=longest,
    )


def _rows_per_step(
    config: RunConfig,
    lengths: Lengths | None,
    widths: Lengths | None,
    unit: int,
    num_steps: int | None,
    total_steps: int | None,
) -> tuple[int | None, int | None]:
    """The rows of an optimizer step, in multiples of `unit`, and the tokens of the longest one; None if unknown."""
    training, length = config.training, row_length(config)
    samples = training.global_samples
    if training.global_tokens is not None:  # fills rows almost completely
        return training.global_tokens // length, None if lengths is None else length
    assert samples is not None
    if config.packing.mode is not PackingMode.isolated:
        return samples, None if widths is None else int(widths.max(initial=0)) // method_facts(config).rows_per_document
    if lengths is None:
        mean = mean_tokens(config)
        if samples <= unit * (length // max(1, longest_document(config))):
            return unit, None  # one pass: even the longest documents fit into it
        return None if mean is None else max(1, math.ceil(samples * min(mean, length) / length / unit)) * unit, None
    assert num_steps is not None and total_steps is not None
    # All epochs of the run, so that no step needs more rows than planned.
    orders = (epoch_order(len(lengths), training.seed, epoch) for epoch in range(math.ceil(total_steps / num_steps)))
    steps = [lengths[step] for order in orders for step in cut_into_steps(order, lengths, _step_size(config))]
    rows = min(rows_needed(steps, length, unit), math.ceil(samples / unit) * unit)
    return rows, max(longest_row(step, rows) for step in steps[:total_steps])


def _padding_share(config: RunConfig, lengths: Lengths, widths: Lengths, micro: int) -> float:
    """The share of padding in one epoch if each pass is as wide as its longest document; 0 for packed rows."""
    if config.packing.mode is PackingMode.isolated or not len(lengths):
        return 0.0
    order = widths[epoch_order(len(lengths), config.training.seed, 0)]
    width = np.maximum.reduceat(order, np.arange(0, len(order), micro)).sum() * micro
    return 1.0 - float(lengths.sum() / width)


def schedule_of(config: RunConfig, plan: BatchPlan, lengths: Lengths, widths: Lengths | None = None) -> Schedule:
    """The schedule of every rank's sampler: the plan over the prepared data. Shapes: as `solve_batch`."""
    assert plan.rows_per_step is not None
    return Schedule(
        lengths=lengths,
        widths=widths,
        size=_step_size(config),
        rows_per_step=plan.rows_per_step,
        is_packed=plan.is_packed,
        seed=config.training.seed,
    )


def largest_micro_batch(samples_per_rank: int, max_length: int) -> int:
    """Padded rows of a pass: the largest divisor of a rank's documents that stays within the token limit."""
    most = max(1, PADDED_TOKENS_PER_PASS // max(1, max_length))
    return max(size for size in range(1, min(most, samples_per_rank) + 1) if samples_per_rank % size == 0)


def row_length(config: RunConfig) -> int:
    """Tokens a row holds: packed rows may be longer than one document."""
    if config.packing.mode is PackingMode.isolated:
        return config.packing.row_length or shortest_row(config)
    return longest_side(config)


def shortest_row(config: RunConfig) -> int:
    """Tokens of the shortest packed row that holds every document, of a pair both sides."""
    return config.training.max_length * method_facts(config).rows_per_document


def _step_size(config: RunConfig) -> StepSize:
    training = config.training
    if training.global_samples is not None:
        return StepSize(documents=training.global_samples)
    return StepSize(tokens=training.global_tokens, row_length=row_length(config))


def longest_document(config: RunConfig) -> int:
    """Tokens that no document of the data exceeds, of a pair both sides."""
    return longest_side(config) * method_facts(config).rows_per_document


def longest_side(config: RunConfig) -> int:
    """Tokens that no document or side exceeds: `training.max_length`, or less if generated ones are shorter."""
    longest, dataset = config.training.max_length, config.dataset
    return min(longest, dataset.synthetic.max_tokens) if dataset.source is Source.synthetic else longest


def mean_tokens(config: RunConfig) -> float | None:
    """Mean tokens of a document that is cut to `training.max_length`, or of a pair's sides; None if unknown."""
    dataset, longest, sides = config.dataset, config.training.max_length, method_facts(config).rows_per_document
    if dataset.mean_tokens is not None:
        return min(dataset.mean_tokens, longest * sides)  # the facts are of uncut documents
    if dataset.source is not Source.synthetic:
        return None
    drawn = dataset.synthetic
    num_documents = min(drawn.num_documents, dataset.max_documents or drawn.num_documents, _MOST_DRAWN)
    lengths = np.minimum(_drawn_lengths(tuple(asdict(drawn).items()), num_documents), longest)
    return float(lengths.mean()) * (sides if drawn.pairs else 1)


def count_documents(config: RunConfig) -> int | None:
    """Documents of an epoch, without those held out; None if unknown."""
    dataset = config.dataset
    num_documents = dataset.num_documents
    if num_documents is None and dataset.source is Source.synthetic:
        num_documents = dataset.synthetic.num_documents
    if num_documents is None:
        return None
    return max(1, round(min(num_documents, dataset.max_documents or num_documents) * (1 - dataset.validation_share)))


@lru_cache(maxsize=8)
def _drawn_lengths(settings: tuple[tuple[str, Any], ...], num_documents: int) -> Lengths:
    return draw_lengths(SyntheticConfig(**dict(settings)), num_documents)
