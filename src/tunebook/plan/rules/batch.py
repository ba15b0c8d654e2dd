"""Rules about the batch: the documents or tokens of a step, and their layout in rows."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Generation, PackingMode, Source
from tunebook.config.schema import RunConfig, data_ranks
from tunebook.plan.rules.frame import Finding, rule


@rule("batch-one-way", "training.global_samples")
def batch_one_way(config: RunConfig) -> Finding | None:
    """Require exactly one of `global_samples` and `global_tokens`: a step counts documents or tokens."""
    samples, tokens = config.training.global_samples, config.training.global_tokens
    if samples is not None and tokens is not None:
        message = f"global_samples={samples} and global_tokens={tokens} both set the size of a step"
        return Finding(message, "training.global_tokens=null or training.global_samples=null")
    if samples is None and tokens is None:
        return Finding("the size of an optimizer step is not set", "training.global_samples=64")
    return None


def _rows_unit(config: RunConfig) -> int:
    """Number of rows in one pass of all GPUs."""
    return data_ranks(config) * (config.training.micro_batch_size or 1)


def _row_length(config: RunConfig) -> int:
    return config.packing.row_length or config.training.max_length


def _is_padded(config: RunConfig) -> bool:
    return config.packing.mode is PackingMode.padded


@rule("batch-not-divisible")
def batch_not_divisible(config: RunConfig) -> Finding | None:
    """Require padded documents, or the rows of `global_tokens`, to be a multiple of ranks x micro batch.

    Every GPU passes over the same number of rows. No batch is rounded, because that would train something else.
    """
    training = config.training
    if _is_padded(config):
        key, asked, length = "training.global_samples", training.global_samples, 1
    else:
        key, asked, length = "training.global_tokens", training.global_tokens, _row_length(config)
    unit = _rows_unit(config)
    if asked is None or asked < 1:
        return None
    rows = asked // length
    if rows % unit == 0 or (length > 1 and rows < unit):  # `batch-too-small` covers too few tokens
        return None
    below, above = rows // unit * unit * length, (rows // unit + 1) * unit * length
    nearest = f"{below} and {above} are the nearest that do" if below else f"{above} is the smallest that does"
    made = _documents(asked) if length == 1 else f"{asked} tokens make {rows} rows of {length}, which"
    micro = f" x micro batch {training.micro_batch_size} = {unit}" if training.micro_batch_size else ""
    do = "does" if length == 1 and asked == 1 else "do"
    message = f"{made} {do} not divide by {data_ranks(config)} {_ranks(config)}{micro}; {nearest}"
    closer, other = (below, above) if below and asked - below <= above - asked else (above, below)
    fix = f"{key}={closer}" + (f" or {key}={other}" if other else "")
    return Finding(message, fix, key=key)


def _ranks(config: RunConfig) -> str:
    return "ranks" if config.hardware.generation is Generation.cpu else "GPUs"


def _documents(count: int) -> str:
    return f"{count} document{'s' if count != 1 else ''}"


@rule("batch-too-small")
def batch_too_small(config: RunConfig) -> Iterator[Finding]:
    """Require one document per rank and rows for one pass, in packed mode.

    A GPU without any would have no gradient to add. Divisibility covers padded documents.
    """
    if _is_padded(config):
        return
    samples, tokens, ranks = config.training.global_samples, config.training.global_tokens, data_ranks(config)
    if samples is not None and 1 <= samples < ranks:
        are_fewer = "documents a step are fewer than" if samples > 1 else "document a step is less than one for each of"
        message, fix = f"{samples} {are_fewer} the {ranks} {_ranks(config)}", f"training.global_samples={ranks}"
        yield Finding(message, fix, key="training.global_samples")
    unit, length = _rows_unit(config), _row_length(config)
    if tokens is not None and 1 <= tokens < unit * length:
        message = f"{tokens} tokens a step are fewer than {unit} rows x {length} tokens = {unit * length}"
        yield Finding(message, f"training.global_tokens={unit * length}", key="training.global_tokens")


@rule("tokens-need-packing", "training.global_tokens")
def tokens_need_packing(config: RunConfig) -> Finding | None:
    """Refuse `global_tokens` in padded mode.

    A padded row holds one document of any length, so the tokens of a step are unknown before its documents are drawn.
    """
    tokens = config.training.global_tokens
    if tokens is None or not _is_padded(config):
        return None
    return Finding(f"{tokens} tokens a step need packed rows", "training.global_tokens=null training.global_samples=64")


@rule("batch-larger-than-data", "training.global_samples")
def batch_larger_than_data(config: RunConfig) -> Finding | None:
    """Refuse a batch larger than the data, if `dataset.num_documents` or `max_documents` gives its size.

    A step takes no document twice.
    """
    samples, documents = config.training.global_samples, _fewest_documents(config)
    if samples is None or documents is None or samples <= documents:
        return None
    message = f"{samples} documents a step are more than the data set's {documents}"
    unit = _rows_unit(config) if _is_padded(config) else data_ranks(config)
    most = documents // unit * unit
    fix = f"training.global_samples={most}" if most else "fewer GPUs (hardware.gpus_per_node) or more documents"
    return Finding(message, fix)


def _fewest_documents(config: RunConfig) -> int | None:
    """The smallest stated size of the data set; None if none is stated."""
    data = config.dataset
    made = data.synthetic.num_documents if data.source is Source.synthetic else None
    limits = [count for count in (data.num_documents, data.max_documents, made) if count is not None and count > 0]
    return min(limits, default=None)


@rule("row-shorter-than-document", "packing.row_length")
def row_shorter_than_document(config: RunConfig) -> Finding | None:
    """Require `row_length` to be at least `max_length`: a document is never split over two rows."""
    row, length = config.packing.row_length, config.training.max_length
    if row is None or row >= length or _is_padded(config):
        return None
    message = f"rows of {row} tokens cannot hold documents of training.max_length={length}"
    return Finding(message, f"packing.row_length={length}")
