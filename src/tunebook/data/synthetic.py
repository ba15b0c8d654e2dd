"""Generate documents or pairs that a model can learn: for machines without the hub, for speed measurements, for tests.

Every document is a random walk over a small set of tokens with four possible successors each, one of them likely. The
first part of a document is a prompt that the loss does not count; the rest, ended by EOS, is the answer. A model first
learns which tokens occur, then which follow which; both show in the loss within tens of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.schema import SyntheticConfig
from tunebook.data.corpus import (
    IGNORED_LABEL,
    CorpusKind,
    Loaded,
    SourceRecord,
    arrow_schema,
    hash_bytes,
    write_batches,
)
from tunebook.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

NUM_TOKENS_USED = 64  # few, so that each is seen often enough to be learned within tens of steps
SUCCESSOR_SHARES = (0.70, 0.15, 0.10, 0.05)  # 0.91 nats per token, against 11.9 of a uniform guess among 151,936

_MIN_LENGTH = 4  # tokens: one of prompt, two of answer, EOS
_MIN_VOCAB_SIZE = 8
_PROMPT_SHARES = (0.1, 0.5)  # of a document's length
_DOCUMENTS_PER_CHUNK = 1000  # generated at once; a document depends on the seed and its number only
_SKIPPED_IDS = 256  # the first ids and the last tenth of a large vocabulary hold most special tokens
_TABLE, _CHUNK = 0, 1  # separate streams of random numbers


def load_synthetic(
    config: SyntheticConfig,
    *,
    num_documents: int,
    vocab_size: int,
    eos_token_id: int,
    file: Path,
) -> Loaded:
    """Generate the documents into an Arrow file. Raises: RequestError for settings that cannot be met."""
    if not _MIN_LENGTH <= config.min_tokens <= config.max_tokens or vocab_size < _MIN_VOCAB_SIZE:
        raise RequestError(
            f"dataset.synthetic: min_tokens={config.min_tokens} must be at least {_MIN_LENGTH} (a prompt, an answer "
            f"and EOS) and at most max_tokens={config.max_tokens}, and the vocabulary of {vocab_size} at least "
            f"{_MIN_VOCAB_SIZE} tokens",
            problem_id="synthetic-settings",
        )
    batches = generate(config, num_documents=num_documents, vocab_size=vocab_size, eos_token_id=eos_token_id)
    record = SourceRecord(
        location="synthetic",
        revision=None,
        sha256=None,
        format=f"synthetic, seed {config.seed}",
        num_documents=num_documents,
    )
    kind = _kind(config)
    return Loaded(kind=kind, dataset=write_batches(batches, kind, file), records=[record])


def _kind(config: SyntheticConfig) -> CorpusKind:
    return CorpusKind.token_pair if config.pairs else CorpusKind.tokens


def generate(
    config: SyntheticConfig, *, num_documents: int, vocab_size: int, eos_token_id: int
) -> Iterator[pa.RecordBatch]:
    """The documents or pairs, in batches of their kind's schema."""
    import numpy as np

    table = np.random.default_rng([config.seed, _TABLE])
    token_ids = _choose_token_ids(table, vocab_size, eos_token_id)
    # Distinct successors, or a token could have fewer than four.
    successors = np.argsort(table.random((len(token_ids), len(token_ids))), axis=1)[:, : len(SUCCESSOR_SHARES)]
    for first, random, lengths in _draw_chunks(config, num_documents):
        steps = _walk(random, lengths, successors)
        num_kept = min(_DOCUMENTS_PER_CHUNK, num_documents - first)
        noise = token_ids[random.integers(0, len(token_ids), len(steps))] if config.pairs else None
        yield _to_batch(random, token_ids[steps], lengths, first, num_kept, eos_token_id, noise)


def _choose_token_ids(random: np.random.Generator, vocab_size: int, eos_token_id: int) -> np.ndarray:
    import numpy as np

    low, high = (_SKIPPED_IDS, vocab_size * 9 // 10) if vocab_size > 16 * _SKIPPED_IDS else (0, vocab_size)
    candidates = np.setdiff1d(np.arange(low, high), [eos_token_id])
    return random.choice(candidates, min(NUM_TOKENS_USED, len(candidates)), replace=False)


def draw_lengths(config: SyntheticConfig, num_documents: int) -> np.ndarray:
    """The lengths of the first documents in tokens. Shape: (num_documents,)."""
    import numpy as np

    return np.concatenate([lengths for _, _, lengths in _draw_chunks(config, num_documents)])[:num_documents]


def _draw_chunks(config: SyntheticConfig, num_documents: int) -> Iterator[tuple[int, np.random.Generator, np.ndarray]]:
    """Each chunk's first document, its random numbers after the lengths, and its lengths."""
    import numpy as np

    for first in range(0, num_documents, _DOCUMENTS_PER_CHUNK):
        random = np.random.default_rng([config.seed, _CHUNK, first])
        drawn = random.lognormal(config.log_mean_tokens, config.log_sigma_tokens, _DOCUMENTS_PER_CHUNK)
        yield first, random, np.clip(np.rint(drawn), config.min_tokens, config.max_tokens).astype(np.int64)


def _walk(random: np.random.Generator, lengths: np.ndarray, successors: np.ndarray) -> np.ndarray:
    """All documents' walks, concatenated: all documents take one step together, until only the longest are left."""
    import numpy as np

    choices = random.choice(len(SUCCESSOR_SHARES), size=int(lengths.sum()), p=SUCCESSOR_SHARES)
    by_length = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[by_length]
    num_active = np.searchsorted(-lengths[by_length], -np.arange(int(lengths.max())), side="left")
    steps = np.empty(int(lengths.sum()), dtype=np.int64)
    current = random.integers(0, len(successors), len(lengths))
    steps[starts] = current
    for step in range(1, int(lengths.max())):
        places = starts[: num_active[step]] + step
        current = successors[current[: len(places)], choices[places]]
        steps[places] = current
    return steps


def _to_batch(
    random: np.random.Generator,
    tokens: np.ndarray,
    lengths: np.ndarray,
    first: int,
    num_kept: int,
    eos_token_id: int,
    noise: np.ndarray | None,
) -> pa.RecordBatch:
    """The first `num_kept` documents as Arrow columns: EOS at the end, labels masked over the prompt.

    With `noise`, the tokens of rejected answers, they are pairs.
    """
    import numpy as np
    import pyarrow as pa

    ends = np.cumsum(lengths)
    tokens[ends - 1] = eos_token_id
    prompt_lengths = np.rint(random.uniform(*_PROMPT_SHARES, len(lengths)) * lengths).astype(np.int64).clip(1)
    position = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
    is_prompt = position < np.repeat(prompt_lengths, lengths)
    sides = [tokens]
    if noise is not None:
        noise[ends - 1] = eos_token_id
        sides.append(np.where(is_prompt, tokens, noise))

    offsets = np.concatenate([[0], ends])[: num_kept + 1].astype(np.int32)
    columns = []
    for side in sides:
        for values in (side, np.where(is_prompt, IGNORED_LABEL, side)):
            kept = values[: offsets[-1]].astype(np.int32)
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(kept)))
    chosen = tokens[: offsets[-1]].astype(np.int32)
    hashes = [hash_bytes(chosen[start:end].tobytes()) for start, end in pairwise(offsets)]
    columns.append(pa.array([f"synthetic:{first + number}" for number in range(1, num_kept + 1)]))
    columns.append(pa.array(hashes, type=pa.uint64()))
    kind = CorpusKind.tokens if noise is None else CorpusKind.token_pair
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(kind))
