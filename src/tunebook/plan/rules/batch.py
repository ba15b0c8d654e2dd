"""Rules about the batch: the documents or tokens of a step, and their layout in rows."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import PackingMode, Source
from tunebook.config.schema import RunConfig, data_ranks
from tunebook.data.batch import row_length, shortest_row
from tunebook.errors import counted
from tunebook.facts.methods import method_facts
from tunebook.plan.rules.frame import Finding, rule


@rule("batch-one-way", "training.global_samples", "training.global_tokens=null, or training.global_samples=null")
def batch_one_way(config: RunConfig) -> Iterator[str]:
    """Refuse `global_samples` together with `global_tokens`: a step counts documents or tokens."""
    samples, tokens = config.training.global_samples, config.training.global_tokens
    if samples is not None and tokens is not None:
        yield f"global_samples={samples} and global_tokens={tokens} both set the size of a step"


def _is_padded(config: RunConfig) -> bool:
    return config.packing.mode is PackingMode.padded


def _rows_per_pass(config: RunConfig) -> int:
    """Number of rows in one pass of all GPUs."""
    return data_ranks(config) * (config.training.micro_batch_size or 1)


@rule("batch-not-divisible", fix="a multiple of the rows of one pass, or another training.micro_batch_size")
def batch_not_divisible(config: RunConfig) -> Iterator[Finding]:
    """Require padded documents, or the rows of `global_tokens`, to be a multiple of ranks x micro batch.

    Every GPU passes over the same number of rows. No batch is rounded, because that would train something else.
    """
    training, rows = config.training, _rows_per_pass(config)
    if _is_padded(config) and training.global_samples is not None and training.global_samples % rows:
        message = (
            f"{counted(training.global_samples, method_facts(config).unit)} cannot be divided into passes of {rows} on "
            "all GPUs"
        )
        yield Finding(message, "training.global_samples")
    tokens, length = training.global_tokens, row_length(config)
    # `batch-too-small` covers too few tokens
    if not _is_padded(config) and tokens is not None and tokens >= rows * length and tokens // length % rows:
        message = f"{counted(tokens // length, 'row')} of {length} tokens cannot be divided into passes of {rows} rows"
        yield Finding(message, "training.global_tokens")


@rule("batch-too-small", fix="a larger batch, or fewer GPUs: hardware.gpus_per_node=1")
def batch_too_small(config: RunConfig) -> Iterator[Finding]:
    """Require one document per rank and rows for one pass, in packed mode.

    A GPU without any would have no gradient to add. Divisibility covers padded documents.
    """
    samples, tokens, ranks = config.training.global_samples, config.training.global_tokens, data_ranks(config)
    if _is_padded(config):
        return
    if samples is not None and samples < ranks:
        what = counted(samples, method_facts(config).unit)
        yield Finding(f"a step has {what} for {ranks} GPUs", "training.global_samples")
    rows, length = _rows_per_pass(config), row_length(config)
    if tokens is not None and tokens < rows * length:
        message = f"a step has {tokens} tokens, and one pass takes {rows} x {length} = {rows * length}"
        yield Finding(message, "training.global_tokens")


@rule("tokens-need-packing", "training.global_tokens", "training.global_tokens=null training.global_samples=64")
def tokens_need_packing(config: RunConfig) -> Iterator[str]:
    """Refuse `global_tokens` in padded mode.

    A padded row holds one document of any length, so the tokens of a step are unknown before its documents are drawn.
    """
    if config.training.global_tokens is not None and _is_padded(config):
        yield f"{config.training.global_tokens} tokens per step need packed rows"


@rule("batch-larger-than-data", "training.global_samples")
def batch_larger_than_data(config: RunConfig) -> Iterator[Finding]:
    """Refuse a batch larger than the data, if `dataset.num_documents` or `max_documents` gives its size.

    A step takes no document twice.
    """
    data, samples = config.dataset, config.training.global_samples
    made = data.synthetic.num_documents if data.source is Source.synthetic else None
    stated = [count for count in (data.num_documents, data.max_documents, made) if count is not None]
    if samples is not None and stated and samples > min(stated):
        message = f"a step has {counted(samples, method_facts(config).unit)}, and the data set has {min(stated)}"
        yield Finding(message, fix=f"training.global_samples={min(stated)}, or more documents")


@rule("row-shorter-than-document", "packing.row_length", "packing.row_length=null")
def row_shorter_than_document(config: RunConfig) -> Iterator[str]:
    """Require `row_length` to hold a document, or both sides of a pair: they are never split over two rows."""
    row, length, sides = config.packing.row_length, config.training.max_length, method_facts(config).rows_per_document
    if row is not None and row < shortest_row(config) and not _is_padded(config):
        what = f"{sides} sides" if sides > 1 else "documents"
        yield f"rows of {row} tokens cannot hold {what} of training.max_length={length}"
